"""Backend: PyTorch's product of bf16 by int4, and vLLM's Marlin and Machete where vLLM is installed.

Each has the weight in an order of its own, to which it is converted before anything is timed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, TypeAlias

from tritongemm.backends._accepted import accepts
from tritongemm.backends.mixed_input import pytorch, vllm
from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Capabilities, LibraryBackend, WeightLayout
from tritongemm.system import settings

_Multiply: TypeAlias = "Callable[[Problem, Operands, Tensor], Callable[[], Tensor]]"
# What makes a call that returns C, of the operands and of bytes [N, K / 2] in plain order.
_LIBRARIES: Final[dict[str, _Multiply]] = {"int4pack": pytorch.product, "marlin": vllm.marlin, "machete": vllm.machete}


class MixedInputBackend(LibraryBackend):
    """The libraries that models with weights of int4 are served by today."""

    summary = "PyTorch's _weight_int4pack_mm, and vLLM's Marlin and Machete where vLLM is installed; by its name"
    named_only = True
    capabilities = Capabilities(orders_b=(PLAIN, "halves_32", "halves_128", "fragments"), scales=("mainloop",))

    def available(self) -> Support:
        """Return whether PyTorch is installed."""
        return SUPPORTED if settings.version("torch") != "missing" else Support("the torch package is not installed")

    def version(self) -> str:
        """Return the versions of the packages."""
        return f"torch {settings.version('torch')}, vllm {settings.version('vllm')}"

    def _supports(self, problem: Problem, target: Target) -> Support:
        if problem.a.scaling is not None or problem.b.dtype != "int4" or problem.a.dtype != problem.c.dtype:
            return Support(f"it multiplies bf16 or fp16 by int4, not {problem.dtypes}")
        if problem.bias != "none" or problem.layout != "TN":
            return Support("it reads operands contiguous along K (TN) and adds no bias")
        return SUPPORTED

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        every = [Config(name, 0, 0, 0, num_warps=0, num_stages=0, backend=self.name) for name in _LIBRARIES]
        return [one for one in every if self.operation(problem, operands, one)][: limit or None]

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a call that computes C by one of the libraries, PyTorch's by default; None if that refuses."""
        name = config.template if config else "int4pack"
        if name not in _LIBRARIES:
            return None
        b, order = operands["b"], problem.b.order
        plain = b if order == PLAIN else registry.get(WeightLayout, order).unpack(b)
        try:
            multiply = _LIBRARIES[name](problem, operands, plain.mT.contiguous())
        except (UnavailableError, RuntimeError, ValueError):
            return None
        compute = partial(_into, operands["c"], multiply) if config else multiply
        return compute if accepts(compute) else None


def _into(c: Tensor, multiply: Callable[[], Tensor]) -> Tensor:
    """Write a product to C, where its library has not done so; not in graphs, in which calls are timed."""
    import torch

    made = multiply()
    written = made.data_ptr() == c.data_ptr() or (c.is_cuda and torch.cuda.is_current_stream_capturing())
    return made if written else c.copy_(made)

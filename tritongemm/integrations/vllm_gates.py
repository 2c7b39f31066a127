"""vLLM's MLPs whose gate, up and SiLU are one operation, `linear_act`, where a table has such rows for their weight.

The weight's rows of gate and of up then alternate in place. Where no row holds for an M, the operation is the tuned
product and one kernel. A layer whose weight is loaded anew refuses that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tritongemm.integrations.process import attribute, define_opaque, guarded, plain
from tritongemm.operations.linear_act import ActivatedOperands, interleave_gate_up
from tritongemm.operations.served_problems import layer_problem
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.serving import server_calls
from tritongemm.serving.added_operations import linear_act
from tritongemm.serving.fused_layers import has_fused_rows

_ACT: Final = "silu_mul"
_TYPES: Final = (torch.bfloat16, torch.float16)


def serve(model: nn.Module) -> int:
    """Make gate, up and SiLU of a loaded model's MLPs one operation where rows are faster; return how many."""
    known = guarded("vLLM", "gated MLP", lambda mlp: _is_gated(mlp) and _has_rows(mlp.gate_up_proj.weight))
    served = [mlp for mlp in model.modules() if known(mlp)]
    owners = Counter(weight.data_ptr() for weight in model.parameters()) if served else Counter[int]()
    served = [mlp for mlp in served if owners[mlp.gate_up_proj.weight.data_ptr()] == 1]
    for mlp in served:
        with torch.no_grad():
            weight = plain(mlp.gate_up_proj.weight)
            weight.copy_(interleave_gate_up(*weight.chunk(2)))
        mlp.gate_up_proj.weight.weight_loader = _refuse
    _make_one(served, lambda x, w: linear_act(x, w, _ACT))
    return len(served)


def count(model: nn.Module) -> None:
    """Have a capture see gate, up and SiLU of a loaded model's MLPs as one operation, and their product beside it."""
    _make_one(list(filter(guarded("vLLM", "gated MLP", _is_gated), model.modules())), _compute_counted)


def _compute_counted(x: Tensor, w: Tensor) -> Tensor:
    gate, up = functional.linear(x, w).chunk(2, -1)
    return server_calls.activated_or(ActivatedOperands(x, w, _ACT), lambda: functional.silu(gate) * up)


def _make_one(mlps: Sequence[Any], compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    operation = define_opaque("vllm_gated_linear", "(Tensor x, Tensor w) -> Tensor", compute, _infer) if mlps else None
    for mlp in mlps:
        layer = mlp.gate_up_proj
        kind: Any = type(layer.quant_method)
        method: Any = object.__new__(_gated(kind))
        vars(method).update(attribute(layer.quant_method, "__dict__", {}), operation=operation)
        layer.quant_method, mlp.act_fn = method, nn.Identity()


def _infer(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2))


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("gate and up alternate in this weight, as tuned kernels read it: start vLLM anew to load others")


class _Gated:
    """A layer's method, whose result is activated."""

    operation: Any

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return SiLU(gate) * up."""
        result: Tensor = self.operation(x, layer.weight)
        return result


@cache
def _gated(base: Any) -> Any:
    return type(base.__name__, (_Gated, base), {"__doc__": base.__doc__, "__module__": base.__module__})


def _is_gated(mlp: Any) -> bool:
    """Return whether a module computes down(SiLU(gate) * up) of a plain layer: it is asked with numbers."""
    layer, act = (mlp._modules.get(name) for name in ("gate_up_proj", "act_fn"))
    if (
        type(act).__name__ != "SiluAndMul"
        or type(attribute(layer, "quant_method")).__name__ != "UnquantizedLinearMethod"
    ):
        return False
    sizes, weight = attribute(layer, "output_sizes", ()), attribute(layer, "weight")
    if len(sizes) != 2 or sizes[0] != sizes[1] or attribute(layer, "bias") is not None or weight.dtype not in _TYPES:
        return False
    if not weight.is_contiguous() or any("forward" in vars(one) or one._forward_hooks for one in (mlp, layer, act)):
        return False
    asked = SimpleNamespace(
        gate_up_proj=lambda x: (x + 1.0, None), act_fn=lambda x: x * 3.0, down_proj=lambda x: (x - 7.0, None)
    )
    try:
        return bool(type(mlp).forward(asked, 11.0) == 12.0 * 3.0 - 7.0)
    except Exception:  # it computes something else
        return False


def _has_rows(weight: Tensor) -> bool:
    (n, k), dtype = weight.shape, DTYPE_NAMES[weight.dtype]
    problem = replace(layer_problem((1, n, k), (dtype, dtype, dtype), "none"), epilogue=_ACT)
    return n % 16 == 0 and has_fused_rows(problem, weight.get_device())

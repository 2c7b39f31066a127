"""Shared code of the backends that launch a server's own kernels, as the server launches them.

A server's package is located, and imported only when its kernels are to be run. Its Triton kernels are compiled by
Triton at their first call, in the measuring process.
"""

import importlib
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

from tritongemm.backends._accepted import accepts
from tritongemm.backends._scales import coverage, dense, factors
from tritongemm.codegen.reduction_orders import reduction_order
from tritongemm.core.config import AXES, Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Call, Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.space import SearchLimits, Space, TemplateSpace
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.machine import find_machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import BuildInputs, Capabilities, LibraryBackend, ServerFormat
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning.prune import prune
from tritongemm.system import settings

# The values tried of a row's fields: those of the servers' own tuning scripts, and smaller groups of rows of tiles.
_TRIED: dict[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128, 256), "block_n": (32, 64, 128, 256), "block_k": (64, 128),
    "group_m": (1, 2, 4, 8, 16, 32, 64), "split_k": (1,), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5),
}  # fmt: skip
_RESULTS = ("bf16", "fp16", "fp32")
# The bounds of what is launched of a config from anywhere; numbers of programs, warps and elements are powers of two.
_BOUNDS = {
    "block_m": (16, 512), "block_n": (16, 512), "block_k": (16, SCALED_BLOCK), "split_k": (1, 64), "num_warps": (1, 32),
}  # fmt: skip
_MOST = {"group_m": 1 << 20, "num_stages": 16}


class ServerBackend(LibraryBackend, abstract=True):
    """A server's own Triton kernels for fp8 in blocks of 128 x 128: for one product, and for experts.

    A config has the fields of a row of the server's tables, and is named after our template with such tiles. `top` is
    the name of the server's package.
    """

    named_only = True
    compiles = True
    states_orders = True
    capabilities = Capabilities(kinds=("one", "grouped"), scales=("mainloop",))
    top: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]

    def available(self) -> Support:
        """Say whether the server's package is installed, without importing it."""
        found = find_spec(self.top)
        there = found is not None and found.origin is not None  # a folder of that name is no package
        return SUPPORTED if there else Support(f"the {self.top} package is not installed")

    def version(self) -> str:
        """Return the version of the package."""
        return settings.version(self.top)

    def reduction_order(self, config: Config, problem: Problem, target: Target) -> ReductionOrder | Support:
        """Return the order of our template with the tiles of a row: what decides is which instructions multiply."""
        if config.split_k > 1:
            return Support(f"{self.name} does not state in which order it adds the sums of {config.split_k} splits")
        return reduction_order(config, problem, target)

    @abstractmethod
    def _product(self, problem: Problem, operands: Operands, config: Config) -> Call:
        """Return a call of the server's kernel for one product."""

    @abstractmethod
    def _of_experts(self, problem: Problem, operands: Operands, config: Config) -> Call:
        """Return a call of the server's kernel of experts; errors are those of `_product`."""

    def _fields(self, problem: Problem, target: Target) -> Mapping[str, tuple[int, ...]]:
        """Return the other values tried of a row's fields, by the name of an axis or option."""
        return {}

    def _supports(self, problem: Problem, target: Target) -> Support:
        if problem.a.dtype not in self.dtypes or problem.a.dtype != problem.b.dtype:
            return Support(f"its kernels multiply {' or '.join(self.dtypes)}, not {problem.dtypes}")
        if problem.c.dtype not in _RESULTS:
            return Support(f"its kernels write {', '.join(_RESULTS)}, not {problem.c.dtype}")
        if coverage(problem) != "block":
            return Support("its kernels take scales for 1 x 128 of A and 128 x 128 of B")
        if problem.bias != "none" or problem.layout != "TN":
            return Support("its kernels read operands contiguous along K (TN) and add no bias")
        if problem.masked:
            return Support("its kernel of experts reads rows that follow each other, not groups of equal room")
        return SUPPORTED

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(config, name)
            if not least <= value <= most or value & (value - 1):
                return Support(f"{name} must be a power of two from {least} to {most}, not {value}")
        for name, most in _MOST.items():
            if not 1 <= getattr(config, name) <= most:
                return Support(f"{name} must be from 1 to {most}, not {getattr(config, name)}")
        if config.template not in self._limits(problem, target).templates:
            return Support(f"{config.template} stands for another of its kernels")
        more = self._fields(problem, target)
        if config.block_k not in self._depths(problem, target):
            return Support(f"its kernel does not take {config.block_k} of K at once")
        if config.split_k > 1 and "split_k" not in more:
            return Support("its kernel does not split K")
        unknown = [name for name, value in config.options if value not in more.get(name, (0,))]
        return Support(f"its kernel has no {unknown[0]}") if unknown else SUPPORTED

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        index = operands["a"].device.index
        target = find_machine(None, None if index is None else str(index)).target
        self._call(problem, operands, self._today(problem, target)[0])  # raises where something is missing
        return self.list_candidates(problem, target)[: limit or None]

    def list_candidates(self, problem: Problem, target: Target) -> list[Config]:
        """Return the configs to try: what the server runs today, then those that are expected to be the fastest.

        Configs that differ only in the order of tiles follow after one of each other kind.
        """
        fields = _TRIED | {"block_k": self._depths(problem, target)} | dict(self._fields(problem, target))
        names = [*AXES, *(name for name in fields if name not in AXES)]
        (template,) = self._limits(problem, target).templates
        space = Space(target, problem, (TemplateSpace(template, tuple((name, fields[name]) for name in names)),))
        ranked = cost_model.rank(prune(space, problem, target).kept, problem, target).configs
        seen = Counter[str]()
        turns = dict[Config, int]()
        for config in ranked:
            turns[config] = seen[config.kernel_name]
            seen[config.kernel_name] += 1
        own = map(self._own, sorted(ranked, key=turns.__getitem__))
        return list(dict.fromkeys([*self._today(problem, target), *own]))

    def _own(self, config: Config) -> Config:
        """Return the config of this backend with the fields of another's; options that are zero are left out."""
        options = tuple((name, value) for name, value in config.options if value)
        return replace(config, backend=self.name, options=options)

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a call that computes C, whose kernel is compiled; None if Triton can't compile or launch it.

        Without a config it is what the server runs today. A package of another interface raises an UnavailableError.
        """
        if config is None:
            config = self._today(problem, find_machine(None).target)[0]
        call = self._call(problem, operands, config)
        return call if _compiles(call) else None

    def _call(self, problem: Problem, operands: Operands, config: Config) -> Call:
        make = self._of_experts if problem.kind == "grouped" else self._product
        return make(problem, operands, config)

    def _limits(self, problem: Problem, target: Target) -> SearchLimits:
        return self._formats[problem.kind].limits(problem.family, target)

    def _depths(self, problem: Problem, target: Target) -> tuple[int, ...]:
        known = dict(self._limits(problem, target).axes).get("block_k", _TRIED["block_k"])
        return tuple(depth for depth in known if depth <= SCALED_BLOCK)

    def _today(self, problem: Problem, target: Target) -> list[Config]:
        """Return what the server runs without a table."""
        return [self._own(config) for config in self._limits(problem, target).first]

    @cached_property
    def _formats(self) -> Mapping[str, ServerFormat]:
        """The formats of the server's tables, by the kind of problem."""
        return {found.computes: found for found in registry.every(ServerFormat) if found.backend == self.name}


def load(path: str) -> ModuleType:
    """Import a module of a server. Raises UnavailableError: it does not load on this machine."""
    try:
        return importlib.import_module(path)
    except Exception as error:  # importing a server's modules may raise anything
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnavailableError(f"{path} does not load: {why}") from error


def find(path: str, name: str) -> Any:
    """Return a function or kernel of a server's module; an UnavailableError where this version has it not."""
    found = vars(load(path)).get(name)
    if found is None:
        raise UnavailableError(f"{path} of this version has no {name}")
    return found


def bound(function: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """Return those of the arguments that a function takes; an UnavailableError where it requires another one."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    if needed:
        raise UnavailableError(f"{function.__name__} of this version needs {needed[0]}, which is not known here")
    return {p.name: given[p.name] for p in parameters if p.name in given}


def row(config: Config) -> dict[str, int]:
    """Return the row of a server's table for a config's tiles."""
    return {
        "BLOCK_SIZE_M": config.block_m, "BLOCK_SIZE_N": config.block_n, "BLOCK_SIZE_K": config.block_k,
        "GROUP_SIZE_M": config.group_m, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def tiles(problem: Problem, config: Config) -> int:
    """Return the tiles of one product."""
    return cdiv(problem.m, config.block_m) * cdiv(problem.n, config.block_n)


def product_arguments(problem: Problem, operands: Operands, out: Tensor | None = None) -> dict[str, object]:
    """Return the arguments of both servers' kernels of one product, by parameter name."""
    a, b, c = operands["a"], operands["b"].T, operands["c"]
    of_a, of_b = (dense(factors(problem, operands, name)) for name in ("scale_a", "scale_b"))
    return {
        "A": a, "B": b, "C": c if out is None else out, "As": of_a, "Bs": of_b,
        "M": problem.m, "N": problem.n, "K": problem.k, "group_n": SCALED_BLOCK, "group_k": SCALED_BLOCK,
        "stride_am": a.stride(0), "stride_ak": a.stride(1), "stride_bk": b.stride(1), "stride_bn": b.stride(0),
        "stride_cm": c.stride(0), "stride_cn": c.stride(1),
        "stride_As_m": of_a.stride(0), "stride_As_k": of_a.stride(1),
        "stride_Bs_k": of_b.stride(1), "stride_Bs_n": of_b.stride(0),
    }  # fmt: skip


def launcher(kernel: Any, grid: tuple[int, ...], given: Mapping[str, object], config: Config) -> Call:
    """Return a launch of a server's Triton kernel. Raises UnavailableError: the kernel has other parameters."""
    row_values = row(config)
    arguments = bound(kernel.fn, {**given, **row_values})
    settings_ = {name: row_values[name] for name in ("num_warps", "num_stages")}

    def call() -> None:
        kernel[grid](**arguments, **settings_)

    return call


def expert_arguments(problem: Problem, operands: Operands, config: Config) -> dict[str, object]:
    """Return the arguments of both servers' functions that launch their expert kernel, by parameter name.

    Each row is a separate token, which is routed to one expert.
    """
    import triton.language as tl

    compute = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[problem.c.dtype]
    return {
        "A": operands["a"], "B": operands["b"].mT, "C": operands["c"].unsqueeze(1),
        "A_scale": dense(factors(problem, operands, "scale_a")), "B_scale": operands["scale_b"].contiguous(),
        "mul_routed_weight": False, "top_k": 1, "config": row(config), "compute_type": compute,
        "use_fp8_w8a8": True, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False,
        "per_channel_quant": False, "block_shape": [SCALED_BLOCK, SCALED_BLOCK],
    }  # fmt: skip


def _compiles(call: Call) -> bool:
    """Return whether a kernel compiles and launches, by trying it."""
    from triton.runtime.errors import TritonError

    try:
        return accepts(call)
    except (TritonError, AssertionError):
        return False

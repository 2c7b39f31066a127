"""Backend: PyTorch's own GEMM, the library every candidate is measured against (cuBLAS(Lt) or hipBLASLt under it).

It has no batched products of eight-bit types. There its calls of single products are made one after another, in one
graph, as its users make them; where all products share B and nothing is added, that is one call of all rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from tritongemm.backends._scales import coverage
from tritongemm.backends.torch import scaled
from tritongemm.core.config import Config
from tritongemm.core.epilogues import EPILOGUES, RESIDUAL
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.operations.torch_limits import takes_fp8, takes_groups, takes_int8
from tritongemm.plugins.contracts import Capabilities, LibraryBackend
from tritongemm.system import settings

# PyTorch chooses its kernel itself.
CHOICE = Config("default", 0, 0, 0, num_warps=0, num_stages=0, backend="torch")
# With `use_fast_accum`: sums of fp8 are not promoted on the way.
FAST = replace(CHOICE, options=(("fast", 1),))
_NAMED = NamedKernel("torch", "native")  # as AITER's files have it
_DENSE = ("bf16", "fp16", "fp32")
_MOST_SIZES = 100_000  # of which a process compiles the second step


class TorchBackend(LibraryBackend):
    """PyTorch as its users call it."""

    summary = "PyTorch itself, which races anyway; alone it is measured as the candidate"
    baseline = True
    capabilities = Capabilities(
        kinds=("one", "batched", "grouped"), scales=("epilogue", "mainloop"), tensor_scales=True, epilogues=EPILOGUES
    )

    def available(self) -> Support:
        """Return whether PyTorch is installed."""
        return SUPPORTED if settings.version("torch") != "missing" else Support("the torch package is not installed")

    def named_kernel(self, config: Config | None) -> NamedKernel | None:
        """Return PyTorch's name, as its choice of a kernel is its own."""
        return _NAMED

    def config_of(self, kernel: NamedKernel) -> Config | None:
        """Return PyTorch's one config."""
        return CHOICE

    def _supports(self, problem: Problem, target: Target) -> Support:
        known = function(problem.without_epilogue)
        return SUPPORTED if known else Support("PyTorch has no function for these types and sizes")

    def _list_algorithms(self, problem: Problem, operands: Operands, limit: int) -> Iterable[Config]:
        """Yield PyTorch's candidates, which only a run without any other needs: its choice, also with faster sums."""
        if not self.operation(problem, operands):
            return []
        return [CHOICE, FAST] if function(problem) == "_scaled_mm" else [CHOICE]

    def operation(self, problem: Problem, operands: Operands, config: Config | None = None) -> Call | None:
        """Return a call that computes C as a user of PyTorch would, or None where PyTorch has no GEMM for the problem.

        Without a config the fp8 and int8 paths allocate C, as they do for a user; one says whether sums of fp8 may be
        faster.
        """
        import torch

        if problem.epilogue != "none":
            into = None if problem.groups else CHOICE  # PyTorch's grouped products only give new memory
            return two_steps(problem, operands, lambda p, own: self.operation(p, own, into))
        if problem.kind == "batched":
            if batched_function(problem):
                return batched_product(problem, operands)
            into = config or CHOICE  # C, as the products of a batch follow each other in it
            return one_after_another(problem, operands, lambda p, own: self.operation(p, own, into))
        if problem.kind == "grouped":
            return grouped_product(problem, operands, config is not None)
        name = function(problem)
        if not name:
            return None
        fast = bool(config and config.option("fast"))
        if coverage(problem):
            return scaled.product(problem, operands, config is not None, fast)
        a, b, c, bias = operands["a"], operands["b"], operands["c"], operands.get("bias")
        row = bias if problem.bias == "n" else None
        column = bias[:, None] if bias is not None and problem.bias == "m" else None
        if name == "_scaled_mm":
            one = torch.ones((), device=a.device)
            left = a if problem.a.row_major else a.contiguous()
            right = b.T.contiguous().T if problem.b.row_major else b
            out, given = c.dtype, {"out": c} if config else {}
            return lambda: torch._scaled_mm(
                left, right, one, one, bias=row, out_dtype=out, use_fast_accum=fast, **given
            )
        if name == "_int_mm":
            return (lambda: torch._int_mm(a, b, out=c)) if config else (lambda: torch._int_mm(a, b))
        if name == "addmm":
            added = row if row is not None else column
            return lambda: torch.addmm(added, a, b, out=c)
        return lambda: torch.mm(a, b, out=c)

    def torch_function(self, problem: Problem) -> str:
        """Return `function` where it reads the operands in place, so that a generated module can call it; else ""."""
        if problem.kind == "grouped" or (problem.kind == "batched" and not batched_function(problem)):
            return ""  # a generated module has no call of it
        name = function(problem) if problem.epilogue == "none" else ""
        if coverage(problem) not in ("", "row") or (name == "_int_mm" and problem.extras):
            return ""
        as_they_are = name != "_scaled_mm" or (problem.a.row_major and not problem.b.row_major)
        return name if as_they_are else ""


def two_steps(problem: Problem, operands: Operands, call_of: Callable[[Problem, Operands], Call | None]) -> Call | None:
    """Return a call that computes the product, then its epilogue by one kernel.

    ``torch.compile`` makes it, but for a result in blocks on a GPU where Triton is.
    """
    import torch

    from tritongemm.operations import linear_act

    first = problem.without_epilogue
    product = operands["a"].new_empty((problem.m, problem.n), dtype=getattr(torch, first.c.type.torch))
    call = call_of(first, operands | {"c": product})
    if call is None:
        return None
    c, added = operands["c"], operands.get("bias") if problem.epilogue == RESIDUAL else None
    rows, factors = linear_act.parts(c, problem.m) if problem.in_blocks else (c, None)

    def finish(epilogue: str, run: int, made: Any, rows: Any, factors: Any, added: Any = None) -> Any:
        done = made.float() + added.view_as(made) if epilogue == RESIDUAL else made.float()
        done = linear_act.apply_epilogue(epilogue, done, run)
        if factors is not None:
            done, found = linear_act.quantize_blocks(done, rows.dtype)
            factors.copy_(found)
        rows.copy_(done)

    # For these columns and any rows, of which a table over M has many: of columns that are arguments such a kernel took
    # up to 3.5 times as long. As many are compiled as a run has; here, as a graph may be captured next.
    for tensor in (product, rows, added):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    one_kernel = torch.compile(finish, dynamic=False, options={"compile_threads": 1})
    limits = ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit", "accumulated_cache_size_limit")
    known = {name: _MOST_SIZES for name in limits if hasattr(torch._dynamo.config, name)}
    if factors is not None and factors.is_cuda and settings.version("triton") != "missing":
        from tritongemm.backends.torch.quantised_step import quantise as one_kernel
    try:
        with torch._dynamo.config.patch(known):
            one_kernel(problem.epilogue, problem.run, product, rows, factors, added)
    except Exception:  # the machine has no compiler for it
        one_kernel = finish

    def compute() -> object:
        made = call()
        result = made if isinstance(made, torch.Tensor) else product
        one_kernel(problem.epilogue, problem.run, result, rows, factors, added)
        return c

    return compute


def function(problem: Problem) -> str:
    """Return PyTorch's function: ``mm``, ``addmm``, ``_int_mm``, ``_scaled_mm`` or ``scaled_mm``; "" where it has none.

    Those for a batch are of `batched_function`, or where that has none of the single products; those for groups of
    `grouped_function`.
    """
    if problem.kind == "batched":
        return batched_function(problem) or function(single(problem))
    if problem.kind == "grouped":
        return grouped_function(problem)
    if problem.b.order != PLAIN:
        return ""
    if problem.a.dtype == "int8" and not takes_int8(problem.m, problem.n, problem.k):
        return ""
    if coverage(problem):
        return scaled.function(problem)
    if problem.a.type.is_fp8:
        # cuBLASLt reads fp8 as row-major A times column-major B only.
        refused = problem.c.type.is_fp8 or problem.bias == "m" or not takes_fp8(problem.n, problem.k)
        return "" if refused else "_scaled_mm"
    if problem.a.dtype == "int8":
        return "" if problem.c.dtype != "int32" or problem.bias != "none" else "_int_mm"
    if len({problem.a.dtype, problem.b.dtype, problem.c.dtype}) != 1:
        return ""
    return "mm" if problem.bias == "none" else "addmm"


def batched_function(problem: Problem) -> str:
    """Return PyTorch's function for a batch: ``bmm`` or ``baddbmm``; "" where it has none, as for eight-bit types."""
    narrow = problem.a.type.bytes == 1 or any(spec.scaling for spec in problem.extras)
    if narrow or len({problem.a.dtype, problem.b.dtype, problem.c.dtype}) != 1:
        return ""
    return "bmm" if problem.bias == "none" else "baddbmm"


def batched_product(problem: Problem, operands: Operands) -> Call | None:
    """Return a call that computes C [batch, M, N] as a user of PyTorch would; None where PyTorch has no function."""
    import torch

    name, c = batched_function(problem), operands["c"]
    if name == "bmm" and problem.b.shared and problem.a.row_major:
        # One product of all rows, as ``torch.matmul`` makes of it.
        rows, out, b = operands["a"].flatten(0, 1), c.flatten(0, 1), operands["b"]
        return lambda: torch.mm(rows, b, out=out)
    left, right = (operands[name].expand(problem.batch, -1, -1) for name in "ab")
    if name == "baddbmm":
        added = operands["bias"].unsqueeze(-1 if problem.bias == "m" else -2)
        return lambda: torch.baddbmm(added, left, right, out=c)
    return (lambda: torch.bmm(left, right, out=c)) if name else None


def single(problem: Problem) -> Problem:
    """Return what PyTorch computes of a batch at a time where it has no function for a batch.

    It is one product, or all of them where they share B and all rows follow each other.
    """
    joined = problem.b.shared and problem.a.row_major and problem.bias == "none"
    by_rows = problem.a.scaling is None or (problem.a.scaling.rows == 1 and problem.a.scaling.layout == "rows")
    rows = problem.batch * problem.m if joined and by_rows else problem.m
    return replace(problem, m=rows, batch=1, a=problem.a._replace(shared=False), b=problem.b._replace(shared=False))


def one_after_another(
    problem: Problem, operands: Operands, call_of: Callable[[Problem, Operands], Call | None]
) -> Call | None:
    """Return a call that computes C [batch, M, N] by calls of `single` products; None where PyTorch has none."""
    one, specs = single(problem), problem.operands
    if one.m != problem.m:
        flat = {name: t.flatten(0, 1) if specs[name].batch else t for name, t in operands.items()}
        return call_of(one, flat)
    calls = list[Call]()
    for product in range(problem.batch):
        call = call_of(one, {name: t[product] if specs[name].batch else t for name, t in operands.items()})
        if call is None:
            return None
        calls.append(call)

    def compute() -> object:
        for call in calls:
            call()
        return operands["c"]

    return compute


def grouped_function(problem: Problem) -> str:
    """Return PyTorch's function for groups: ``_grouped_mm``, ``_scaled_grouped_mm``, ``bmm`` or "" for none."""
    same = len({problem.a.dtype, problem.b.dtype, problem.c.dtype}) == 1
    if problem.bias != "none" or not problem.a.row_major:
        return ""
    if problem.masked:
        return "bmm" if same and problem.a.dtype in _DENSE else ""
    readable = takes_groups(problem.k * problem.a.type.bytes, problem.n * problem.b.type.bytes)
    if same and problem.a.dtype == "bf16":
        return "_grouped_mm" if readable else ""
    rows = [e.name for e in problem.extras if e.operator == "*"] == ["scale_a", "scale_b"]
    if not (rows and readable and problem.a.type.is_fp8 and problem.a.type == problem.b.type):
        return ""
    known = problem.a.scaling == problem.b.scaling and problem.c.dtype == "bf16" and not problem.b.row_major
    return "_scaled_grouped_mm" if known else ""


def grouped_product(problem: Problem, operands: Operands, into: bool) -> Call | None:
    """Return a call that computes C as a user of PyTorch would, or None where PyTorch has none."""
    import torch

    name = grouped_function(problem)
    if not name or not hasattr(torch, name):
        return None
    a, b, c = operands["a"], operands["b"], operands["c"]
    if name == "bmm":
        return lambda: torch.bmm(a, b, out=c)
    given: dict[str, Any] = {"offs": operands["offsets"]}
    if name == "_scaled_grouped_mm":
        given |= {"scale_a": operands["scale_a"], "scale_b": operands["scale_b"].view(problem.group_count, problem.n)}
        given |= {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    product: Callable[[], Any] = partial(getattr(torch, name), a, b, **given)
    return (lambda: c.copy_(product())) if into else product

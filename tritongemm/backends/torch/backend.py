"""Backend: PyTorch's own GEMM, the library every candidate is measured against (cuBLAS(Lt) or hipBLASLt under it)."""

from collections.abc import Iterable
from dataclasses import replace

from tritongemm.backends._scales import coverage
from tritongemm.backends.torch import batched, grouped, scaled
from tritongemm.core.config import Config
from tritongemm.core.format_row import NamedKernel
from tritongemm.core.operands import Call, Operands
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.operations.torch_limits import takes_fp8, takes_int8
from tritongemm.plugins.contracts import Capabilities, LibraryBackend
from tritongemm.system import settings

# PyTorch chooses its kernel itself.
CHOICE = Config("default", 0, 0, 0, num_warps=0, num_stages=0, backend="torch")
# With `use_fast_accum`: sums of fp8 are not promoted on the way.
FAST = replace(CHOICE, options=(("fast", 1),))
_NAMED = NamedKernel("torch", "native")  # as AITER's files have it


class TorchBackend(LibraryBackend):
    """PyTorch as its users call it."""

    summary = "PyTorch itself, which races anyway; alone it is measured as the candidate"
    baseline = True
    capabilities = Capabilities(
        kinds=("one", "batched", "grouped"), scales=("epilogue", "mainloop"), tensor_scales=True
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
        return SUPPORTED if function(problem) else Support("PyTorch has no function for these types and sizes")

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

        if problem.kind == "batched":
            if batched.function(problem):
                return batched.product(problem, operands)
            into = config or CHOICE  # C, as the products of a batch follow each other in it
            return batched.one_after_another(problem, operands, lambda p, own: self.operation(p, own, into))
        if problem.kind == "grouped":
            return grouped.operation(problem, operands, config is not None)
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
        if problem.kind == "grouped" or (problem.kind == "batched" and not batched.function(problem)):
            return ""  # a generated module has no call of it
        name = function(problem)
        if coverage(problem) not in ("", "row") or (name == "_int_mm" and problem.extras):
            return ""
        as_they_are = name != "_scaled_mm" or (problem.a.row_major and not problem.b.row_major)
        return name if as_they_are else ""


def function(problem: Problem) -> str:
    """Return PyTorch's function: ``mm``, ``addmm``, ``_int_mm``, ``_scaled_mm`` or ``scaled_mm``; "" where it has none.

    Those for a batch are of `batched.function`, or where that has none of the single products; those for groups of
    `grouped.function`.
    """
    if problem.kind == "batched":
        return batched.function(problem) or function(batched.single(problem))
    if problem.kind == "grouped":
        return grouped.function(problem)
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

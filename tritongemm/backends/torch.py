"""Backend: PyTorch's own GEMM, the library every candidate is measured against (cuBLAS(Lt) or hipBLASLt under it)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tritongemm import settings
from tritongemm.config import Config
from tritongemm.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

LABEL = "torch"
CHOICE = Config("default", 0, 0, 0, num_warps=0, num_stages=0, backend=LABEL)  # what kernel it takes is its own affair


def unavailable() -> str | None:
    """Why PyTorch can't be used here, or None."""
    return None if settings.version("torch") != "missing" else "the torch package is not installed"


def enumerate(problem: Problem, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, most: int = 0) -> list[Config]:
    """PyTorch's one candidate, which only a run without any other needs; none where it has no GEMM for the problem."""
    return [CHOICE] if operation(problem, a, b, bias, c) else []


def operation(
    problem: Problem, a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, config: Config | None = None
) -> Callable[[], object] | None:
    """A call that computes C as a user of PyTorch would, or None where PyTorch has no GEMM for the problem.

    Args:
        problem: dtypes, layouts and bias.
        a, b: operands [M, K] and [K, N].
        bias: [M] or [N], or None.
        c: [M, N], written; without a config the fp8 and int8 paths allocate theirs, as they do for a user.
        config: PyTorch chooses for itself, whatever it says.
    """
    import torch

    row = bias if problem.bias == "n" else None
    column = bias[:, None] if bias is not None and problem.bias == "m" else None
    if problem.a.is_fp8:
        # cuBLASLt reads fp8 as row-major A times column-major B only.
        if problem.c.is_fp8 or column is not None or problem.k % 16 or problem.n % 16:
            return None
        one = torch.ones((), device=a.device)
        left = a if problem.row_major_a else a.contiguous()
        right = b.T.contiguous().T if problem.row_major_b else b
        out, given = c.dtype, {"out": c} if config else {}
        return lambda: torch._scaled_mm(left, right, one, one, bias=row, out_dtype=out, **given)
    if problem.dtype_a == "int8":
        if problem.dtype_c != "int32" or bias is not None or problem.m <= 16 or problem.k % 8 or problem.n % 8:
            return None
        return (lambda: torch._int_mm(a, b, out=c)) if config else (lambda: torch._int_mm(a, b))
    if len({problem.dtype_a, problem.dtype_b, problem.dtype_c}) != 1:
        return None
    if row is not None:
        return lambda: torch.addmm(row, a, b, out=c)
    if column is not None:
        return lambda: torch.addmm(column, a, b, out=c)
    return lambda: torch.mm(a, b, out=c)

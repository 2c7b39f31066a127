"""PyTorch's own batched products: ``bmm``, ``baddbmm``, and ``mm`` where all products of a batch share B."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


def function(problem: Problem) -> str:
    """PyTorch's function for a batch: ``bmm`` or ``baddbmm``; "" where it has none, as for eight-bit types."""
    narrow = problem.a.bytes == 1 or any(spec.scaling for spec in problem.extras)
    if narrow or len({problem.dtype_a, problem.dtype_b, problem.dtype_c}) != 1:
        return ""
    return "bmm" if problem.bias == "none" else "baddbmm"


def product(problem: Problem, operands: Operands) -> Callable[[], object] | None:
    """A call that computes C [batch, M, N] as a user of PyTorch would; None where PyTorch has no function for it.

    Args:
        problem: dtypes, layouts, the bias and what is shared.
        operands: C is written.
    """
    import torch

    name, c = function(problem), operands["c"]
    if name == "bmm" and problem.shared == "b" and problem.row_major_a:
        # One product of all rows, as ``torch.matmul`` makes of it.
        rows, out, b = operands["a"].flatten(0, 1), c.flatten(0, 1), operands["b"]
        return lambda: torch.mm(rows, b, out=out)
    left, right = _batch_of(operands["a"], problem.batch), _batch_of(operands["b"], problem.batch)
    if name == "baddbmm":
        added = operands["bias"].unsqueeze(-1 if problem.bias == "m" else -2)
        return lambda: torch.baddbmm(added, left, right, out=c)
    return (lambda: torch.bmm(left, right, out=c)) if name else None


def _batch_of(matrix: Tensor, batch: int) -> Tensor:
    return matrix if matrix.dim() == 3 else matrix.expand(batch, *matrix.shape)

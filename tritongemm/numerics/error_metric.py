"""Computes the reference of C in float64, and the error of a C against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


def epilogue_reference(problem: Problem, operands: Operands) -> Tensor:
    """Return C in float64 [M, N] or [batch, M, N]: the sum over K with scales and bias, saturated as kernels do."""
    exact = operands["a"].double() @ operands["b"].double()
    for extra in (e for e in problem.extras if e.applied == "epilogue"):
        vector = operands[extra.name].double()
        if vector.dim() == len(extra.lead) + 1:
            vector = vector.unsqueeze(-1 if extra.along == "m" else -2)
        exact = exact.mul_(vector) if extra.operator == "*" else exact.add_(vector)
    if problem.c.is_fp8 or problem.dtype_c == "int8":
        exact = exact.clamp(-problem.c.maximum - (problem.dtype_c == "int8"), problem.c.maximum)
    return exact


def deviation(c: Tensor, exact: Tensor) -> float:
    """Return the largest |C - reference| / (|reference| + rms(reference)); NaN in C counts as infinite."""
    return float(_deviations(c, exact).max())


def outside(c: Tensor, exact: Tensor, limit: float) -> float:
    """Return the share of the elements whose deviation is more than `limit`."""
    return float((_deviations(c, exact) > limit).double().mean())


def _deviations(c: Tensor, exact: Tensor) -> Tensor:
    rms = exact.square().mean().sqrt().clamp_min(1e-30)
    error = (c.double() - exact).abs_().div_(exact.abs() + rms)
    return error.nan_to_num_(nan=float("inf"))

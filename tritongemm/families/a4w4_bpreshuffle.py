"""Family: as a4w4_blockscale, with B shuffled beforehand, as most of AITER's assembly kernels for fp4 read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.families import _shuffled, a4w4_blockscale
from tritongemm.families.a4w4_blockscale import deviation, extras, outside, scale, tolerance
from tritongemm.operands import Operands
from tritongemm.problem import Problem
from tritongemm.target import Target

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = a4w4_blockscale.DTYPE_A, a4w4_blockscale.DTYPE_C
SHUFFLED_B = True


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    return a4w4_blockscale.unsupported(problem, target) or _shuffled.unsupported(problem)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands as bytes; see `a4w4_blockscale.inputs`."""
    operands = a4w4_blockscale.inputs(problem, device, init, seed)
    return operands | {"b": _shuffled.shuffled(operands["b"])}


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N]."""
    return a4w4_blockscale.reference(problem, operands | {"b": _shuffled.plain(operands["b"])})

"""Family: as a8w8, with B shuffled beforehand, as AITER's assembly kernels for int8 read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.families import _shuffled, a8w8
from tritongemm.families.a8w8 import deviation, extras, outside, scale, tolerance
from tritongemm.operands import Operands
from tritongemm.problem import Problem
from tritongemm.target import Target

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "int8", "bf16"  # where nothing else is said
SHUFFLED_B = True


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    return a8w8.unsupported(problem, target) or _shuffled.unsupported(problem)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands; see `_common.inputs`."""
    operands = a8w8.inputs(problem, device, init, seed)
    return operands | {"b": _shuffled.shuffled(operands["b"])}


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N]."""
    return a8w8.reference(problem, operands | {"b": _shuffled.plain(operands["b"])})

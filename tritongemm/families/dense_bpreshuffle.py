"""Family: as dense, with B shuffled beforehand, as some of AITER's assembly kernels for bf16 read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.families import _shuffled, dense
from tritongemm.families.dense import deviation, outside, scale, tolerance
from tritongemm.operands import Operands
from tritongemm.problem import Problem
from tritongemm.target import Target

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A = "bf16"  # where nothing else is said
SHUFFLED_B = True


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    return dense.unsupported(problem, target) or _shuffled.unsupported(problem)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands; see `_common.inputs`."""
    operands = dense.inputs(problem, device, init, seed)
    return operands | {"b": _shuffled.shuffled(operands["b"])}


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N], saturated as the kernels saturate."""
    return dense.reference(problem, operands | {"b": _shuffled.plain(operands["b"])})

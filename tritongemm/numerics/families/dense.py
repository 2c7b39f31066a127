"""Family: C = A @ B (+ bias) with no scales, in any pair of dtypes the target's matrix units read.

The reference is float64. The error is max |C - reference| / (|reference| + rms(reference)): one wrong element
anywhere shows, and rounding C contributes at most half its epsilon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.operands import Operands, bias
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics import error_metric, random_inputs
from tritongemm.numerics.error_metric import deviation, outside
from tritongemm.numerics.random_inputs import INITS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["INITS", "deviation", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    reason = unreadable(problem, target)
    if reason:
        return reason
    if problem.c.is_fp8 and not target.supports(problem.c):
        return f"{target.name} does not convert to {problem.c.name} (C); {_fp8(target)}"
    if problem.a.is_integer != problem.b.is_integer:
        return f"{problem.dtype_a} times {problem.dtype_b} mixes integers with floats"
    if problem.a.is_integer != problem.c.is_integer:
        return f"{problem.dtype_a} operands need an integer C, not {problem.dtype_c}"
    if "int32" in (problem.dtype_a, problem.dtype_b):
        return "int32 operands: matrix units read int8"
    return None


def unreadable(problem: Problem, target: Target) -> str | None:
    """Which operand the target's matrix units do not read, or None."""
    for name, dtype in (("A", problem.a), ("B", problem.b)):
        if dtype.packed > 1:
            return f"{dtype.name} ({name}) has no meaning without scales: --family a4w4_blockscale"
        if not target.supports(dtype):
            return f"{target.name} has no matrix instruction for {dtype.name} ({name}); {_fp8(target)}"
    return None


def _fp8(target: Target) -> str:
    return "it has no fp8" if target.fp8 == "none" else f"its fp8 encoding is {target.fp8}"


def tolerance(problem: Problem) -> float:
    """Largest error that is rounding rather than a fault; 0 for integers."""
    if problem.c.is_integer:
        return 0.0
    if problem.a.is_fp8 or problem.b.is_fp8:
        accumulate = 2**-6  # Hopper's fp8 units keep about 14 bits of the running sum
    elif "fp32" in (problem.dtype_a, problem.dtype_b) or problem.dtype_a != problem.dtype_b:
        accumulate = 2**-8  # tf32 operands
    else:
        accumulate = 2**-12
    return problem.c.epsilon + accumulate


def scale(problem: Problem) -> float:
    """Standard deviation of the random operands; keeps an eight-bit C well inside its range."""
    return round((16 / problem.k**0.5) ** 0.5, 4) if problem.c.is_fp8 else 1.0


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands; see `_common.inputs`."""
    return random_inputs.random_inputs(problem, bias(problem), scale(problem), device, init, seed)


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N], saturated as the kernels saturate."""
    return error_metric.reference(problem, bias(problem), operands)

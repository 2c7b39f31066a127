"""Family: C = (A @ B) * scale_a[:, None] * scale_b[None, :] (+ bias), fp8 or int8 operands with a scale per row of A and
per column of B, as linear layers with quantized activations and weights have them.

The sum over K is exact in int32, or in float32; scales are float32, and C is bf16, fp16 or float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.operands import Operands, OperandSpec, bias
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.numerics import error_metric, random_inputs
from tritongemm.numerics.error_metric import deviation, outside
from tritongemm.numerics.families import dense

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "fp8", "bf16"  # where nothing else is said
_RESULTS = ("bf16", "fp16", "fp32")
_INTEGERS = 37.0  # root mean square of the random ones


def unsupported(problem: Problem, target: Target) -> str | None:
    """Why the target can't run this problem, or None."""
    both_fp8 = problem.a.is_fp8 and problem.b.is_fp8
    if not both_fp8 and (problem.dtype_a, problem.dtype_b) != ("int8", "int8"):
        return f"family a8w8 multiplies fp8 by fp8 or int8 by int8, not {problem.dtype_a} by {problem.dtype_b}"
    if problem.dtype_c not in _RESULTS:
        return f"family a8w8 gives {', '.join(_RESULTS)}, not {problem.dtype_c}"
    return dense.unreadable(problem, target)


def tolerance(problem: Problem) -> float:
    """Largest error that is rounding rather than a fault."""
    return problem.c.epsilon + (2**-6 if problem.a.is_fp8 else 2**-12)


def scale(problem: Problem) -> float:
    """Standard deviation of the random floats of A and B."""
    return 1.0


def extras(problem: Problem) -> tuple[OperandSpec, ...]:
    """Both scales, then the bias; sized so that random operands give a C of about one."""
    size = 1.0 if problem.a.is_fp8 else _INTEGERS
    typical = round(problem.k**-0.25 / size, 6)
    scale_a = OperandSpec("scale_a", DTYPES["fp32"], (problem.m, 1), "*", typical)
    scale_b = OperandSpec("scale_b", DTYPES["fp32"], (problem.n,), "*", typical)
    return scale_a, scale_b, *bias(problem)


def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
    """Random operands; see `_common.inputs`."""
    return random_inputs.random_inputs(problem, extras(problem), scale(problem), device, init, seed)


def reference(problem: Problem, operands: Operands) -> Tensor:
    """C in float64 [M, N]."""
    return error_metric.reference(problem, extras(problem), operands)

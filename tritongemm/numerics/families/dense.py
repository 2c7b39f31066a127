"""Family: C = A @ B (+ bias) with no scales, in any pair of dtypes the target's matrix units read.

The reference is float64. The error is max |C - reference| / (|reference| + rms(reference)): one wrong element
anywhere shows, and rounding C contributes at most half its epsilon.
"""

from collections.abc import Mapping
from typing import ClassVar

from tritongemm.core.epilogues import activation_of
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._standard import StandardFamily, fp8_of, offer_families


class DenseFamily(StandardFamily):
    """C = A @ B (+ bias)."""

    summary = "no scales (the default)"
    kinds = ("one", "batched", "grouped")
    variants: ClassVar[Mapping[str, Defaults]] = {
        "dense_bpreshuffle": Defaults.of("bf16", layout="TN", order="shuffled_16x16")
    }

    def _supports(self, problem: Problem, target: Target) -> Support:
        known = super()._supports(problem, target)
        if known and problem.c.type.is_fp8 and not target.supports(problem.c.type):
            return Support(f"{target.name} does not convert to {problem.c.type.name} (C); {fp8_of(target)}")
        return known

    def _types(self, problem: Problem) -> Support:
        if problem.a.type.is_integer != problem.b.type.is_integer:
            return Support(
                f"{problem.a.dtype} times {problem.b.dtype} mixes integers with floats{offer_families(problem)}"
            )
        if problem.a.type.is_integer != problem.c.type.is_integer:
            kind = "an integer C" if problem.a.type.is_integer else "a C of floats"
            return Support(f"{problem.a.dtype} operands need {kind}, not {problem.c.dtype}")
        if "int32" in (problem.a.dtype, problem.b.dtype):
            return Support("int32 operands: matrix units read int8")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Return the largest error that is rounding rather than a fault; 0 for integers."""
        if problem.c.type.is_integer:
            return 0.0
        if problem.a.type.is_fp8 or problem.b.type.is_fp8:
            accumulate = 2**-6  # Hopper's fp8 units keep about 14 bits of the running sum
        elif "fp32" in (problem.a.dtype, problem.b.dtype) or problem.a.dtype != problem.b.dtype:
            accumulate = 2**-8  # tf32 operands
        else:
            accumulate = 2**-12
        return problem.c.type.epsilon + accumulate

    def input_deviation(self, problem: Problem) -> float:
        """Return the standard deviation of the random operands.

        Sums before an activation are about one, where it is curved: far from zero all are the sum or nothing. So is an
        eight-bit C, beside whose rounding a bias shows.
        """
        about_one = problem.c.type.is_fp8 or activation_of(problem.epilogue)
        return round(problem.k**-0.25, 4) if about_one else 1.0

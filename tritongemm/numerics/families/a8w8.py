"""Family: C = (A @ B) * scale_a[:, None] * scale_b[None, :] (+ bias), of fp8 or int8.

Each row of A and each column of B has a scale, as linear layers with quantized activations and weights have them; or
all of A has one, and all of B (``tensor``).

The sum over K is exact in int32, or in float32; scales are float32, and C is bf16, fp16 or float32.
"""

from collections.abc import Mapping
from typing import ClassVar

from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily

_RESULTS = ("bf16", "fp16", "fp32")


class RowScaledFamily(StandardFamily):
    """C = (A @ B) * scale_a * scale_b (+ bias), a scale for each row of A and each column of B."""

    summary = "fp8 or int8 with a scale per row of A and per column of B (or, --scales tensor, one of each)"
    defaults = Defaults.of("fp8", c="bf16")
    kinds = ("one", "batched", "grouped")
    variants: ClassVar[Mapping[str, Defaults]] = {
        "a8w8_bpreshuffle": Defaults.of("int8", c="bf16", layout="TN", order="shuffled_16x16")
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return a factor for each row and each column, or one for all of A and one for all of B."""
        return GRANULARITIES["row"], GRANULARITIES["tensor"]

    def _types(self, problem: Problem) -> Support:
        both_fp8 = problem.a.type.is_fp8 and problem.b.type.is_fp8
        if not both_fp8 and (problem.a.dtype, problem.b.dtype) != ("int8", "int8"):
            return Support(
                f"family a8w8 multiplies fp8 by fp8 or int8 by int8, not {problem.a.dtype} by {problem.b.dtype}"
            )
        if problem.c.dtype not in _RESULTS and not problem.in_blocks:
            return Support(f"family a8w8 gives {', '.join(_RESULTS)}, not {problem.c.dtype}")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Return the largest error that is rounding rather than a fault."""
        return problem.c.type.epsilon + (2**-6 if problem.a.type.is_fp8 else 2**-12)

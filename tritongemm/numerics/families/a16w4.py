"""Family: C = A @ (B * scales) (+ bias), A of bf16 or fp16 and a weight of four bits whose scales change along K.

B is int4 with a factor in A's type for each 32, 64 or 128 numbers along K of a column, [K / 128, N], or fp4 (e2m1) with
a power of two for each 32 (``weight_mx``), e8m0 [N, K / 32], or a bf16 for each 16 (``weight_16``, for nvfp4),
[K / 16, N]. Of int4 a group may have zero points too, less 8, behind its factors: [K / 128, 2, N]
(``weight_128_zeros``). Two numbers share a byte, [K / 2, N], column-major, the
earlier one in the low half, or as an order of B says.
"""

from collections.abc import Mapping
from typing import ClassVar

from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, WEIGHT_DEPTHS, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._four_bit_weights import SIZES, FourBitWeightFamily
from tritongemm.numerics.families._standard import fp8_of


class SixteenByFourFamily(FourBitWeightFamily):
    """C = A @ (B * scale_b) (+ bias), scales of a weight of four bits."""

    summary = "bf16 or fp16 by int4 (--scales weight_128, _64, _32; weight_128_zeros, …) or fp4 (weight_mx, weight_16)"
    defaults = Defaults.of("bf16", "int4", layout="TN")
    variants: ClassVar[Mapping[str, Defaults]] = {
        f"a16w4_{order}": Defaults.of("bf16", "int4", layout="TN", order=order)
        for order in ("halves_32", "halves_128", "fragments")
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return the factors of a weight of this type: in A's type for groups of int4, e8m0 or bf16 of fp4."""
        if dtype_b == "fp4e2m1":
            return GRANULARITIES["weight_mx"], GRANULARITIES["weight_16"]
        suffix = "_fp16" if dtype_a == "fp16" else ""
        kinds = [f"{depth}{zeros}" for zeros in ("", "_zeros") for depth in reversed(WEIGHT_DEPTHS)]
        return tuple(GRANULARITIES[f"weight_{kind}{suffix}"] for kind in kinds)

    def _types(self, problem: Problem) -> Support:
        if problem.a.dtype not in ("bf16", "fp16") or problem.b.dtype not in SIZES:
            return Support(
                f"family a16w4 multiplies bf16 or fp16 by int4 or fp4, not {problem.a.dtype} by {problem.b.dtype}"
            )
        if problem.b.dtype == "fp4e2m1" and problem.a.dtype != "bf16":
            return Support("family a16w4 multiplies fp4 by bf16: products with its scales may be beyond fp16")
        return self._stored(problem)

    def _supports(self, problem: Problem, target: Target) -> Support:
        if not target.supports(problem.a.type):
            return Support(f"{target.name} has no matrix instruction for {problem.a.dtype} (A); {fp8_of(target)}")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: weights times their scales are rounded to A's type."""
        return problem.c.type.epsilon + problem.a.type.epsilon / 2 * self._rounded(problem) + 2**-12

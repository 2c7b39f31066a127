"""Family: C = A @ (B * scales) (+ bias), A of bf16 or fp16 and a weight of four bits whose scales change along K.

B is int4 with a factor in A's type for each 32, 64 or 128 numbers along K of a column, [K / 128, N], or fp4 (e2m1) with
a power of two for each 32 (``weight_mx``), e8m0 [N, K / 32]. Of int4 a group may have zero points too, less 8, behind
its factors: [K / 128, 2, N] (``weight_128_zeros``). Two numbers share a byte, [K / 2, N], column-major, the
earlier one in the low half, or as an order of B says.
"""

from collections.abc import Mapping
from math import log2
from typing import ClassVar

from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, WEIGHT_DEPTHS, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._standard import StandardFamily, fp8_of, unpacked
from tritongemm.numerics.scale_factors import four_bits_as_numbers, multiplied
from tritongemm.numerics.verify import epilogue_reference
from tritongemm.plugins.contracts import FamilyDefaults

_SIZES = {"int4": 4.6, "fp4e2m1": 2.9}  # root mean square of numbers whose bits are random


class FourBitWeightFamily(StandardFamily):
    """C = A @ (B * scale_b) (+ bias), scales of a weight of four bits."""

    summary = "bf16 or fp16 by int4 (--scales weight_128, _64, _32; weight_128_zeros, …) or fp4 (weight_mx)"
    kinds = ("one", "batched")
    defaults = FamilyDefaults(dtype_a="bf16", dtype_b="int4", dtype_c="bf16", row_major_b=False)
    variants: ClassVar[Mapping[str, FamilyDefaults]] = {
        f"a16w4_halves_{span}": FamilyDefaults(
            dtype_a="bf16", dtype_b="int4", dtype_c="bf16", order_b=f"halves_{span}", row_major_b=False
        )
        for span in (32, 128)
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return the factors of a weight of this type: in A's type for groups of int4, e8m0 for those of fp4."""
        if dtype_b == "fp4e2m1":
            return (GRANULARITIES["weight_mx"],)
        suffix = "_fp16" if dtype_a == "fp16" else ""
        kinds = [f"{depth}{zeros}" for zeros in ("", "_zeros") for depth in reversed(WEIGHT_DEPTHS)]
        return tuple(GRANULARITIES[f"weight_{kind}{suffix}"] for kind in kinds)

    def _types(self, problem: Problem) -> Support:
        if problem.a.dtype not in ("bf16", "fp16") or problem.b.dtype not in _SIZES:
            return Support(
                f"family a16w4 multiplies bf16 or fp16 by int4 or fp4, not {problem.a.dtype} by {problem.b.dtype}"
            )
        if problem.b.dtype == "fp4e2m1" and problem.a.dtype != "bf16":
            return Support("family a16w4 multiplies fp4 by bf16: powers of two of its scales are beyond fp16")
        if problem.c.dtype not in ("bf16", "fp16", "fp32"):
            return Support(f"family a16w4 gives bf16, fp16 or fp32, not {problem.c.dtype}")
        if problem.b.row_major or problem.k % problem.scale_depth:
            depth = problem.scale_depth
            return Support(f"family a16w4 wants B column-major (-col_b) and K a multiple of the {depth} of one scale")
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        if not target.supports(problem.a.type):
            return Support(f"{target.name} has no matrix instruction for {problem.a.dtype} (A); {fp8_of(target)}")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: weights times their scales are rounded to A's type."""
        return problem.c.type.epsilon + problem.a.type.epsilon / 2 + 2**-12

    def typical_scale(self, problem: Problem) -> float:
        """Return the root mean square of the random scales; random operands then give a C of about one."""
        return float(2.0 ** -round(log2(_SIZES[problem.b.dtype]) + log2(problem.k) / 2))

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N]."""
        numbers = four_bits_as_numbers(unpacked(problem, operands["b"]).mT, problem.b.dtype).mT
        return epilogue_reference(problem, multiplied(problem, operands | {"b": numbers}))

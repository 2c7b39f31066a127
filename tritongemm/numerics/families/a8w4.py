"""Family: C = (A * scale_a) @ (B * scale_b) (+ bias), A of fp8 or int8 and a weight of four bits.

A has a float32 factor for each row, or fp8 for each 1 x 128 ([K / 128, M], or as ``block_rows`` [M, K / 128]). B is
int4 with factors in bf16, or beside fp8 fp4 with powers of two, as in family a16w4; with those A may have powers of
two for each 32 numbers along K too (``mx``).
"""

from collections.abc import Mapping
from math import log2, sqrt
from typing import ClassVar

from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import EIGHT_BY_FOUR, GRANULARITIES, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._four_bit_weights import SIZES, FourBitWeightFamily
from tritongemm.numerics.families._standard import OCP_FP8, fp8_of

_INTEGERS = 37.0  # root mean square of random ones of eight bits


class EightByFourFamily(FourBitWeightFamily):
    """C = (A * scale_a) @ (B * scale_b) (+ bias), scales of A and of a weight of four bits."""

    summary = "fp8 or int8 by a weight of fp4 (--scales mx, row_weight_mx, block_weight_mx) or int4 (row_weight_128, …)"
    defaults = Defaults.of("fp8", "fp4e2m1", "bf16", layout="TN")
    variants: ClassVar[Mapping[str, Defaults]] = {
        f"a8w4_{order}": Defaults.of("fp8", "fp4e2m1", "bf16", layout="TN", order=order)
        for order in ("halves_32", "fragments")
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return the factors of A with those of B; of OCP's fp8 by fp4 powers of two first; none of int8 by fp4."""
        powers = dtype_b == "fp4e2m1"
        if powers and dtype_a == "int8":
            return ()
        of_rows = [name for name in EIGHT_BY_FOUR if dtype_a != "int8" or name.startswith("row")]
        names = [name for name in of_rows if name.endswith("_mx") == powers]
        mx = ("mx",) if powers and dtype_a in OCP_FP8 else ()
        return tuple(GRANULARITIES[name] for name in (*mx, *names))

    def _types(self, problem: Problem) -> Support:
        integers = problem.a.dtype == "int8"
        if not (integers or problem.a.type.is_fp8) or problem.b.dtype not in (("int4",) if integers else SIZES):
            return Support(
                "family a8w4 multiplies fp8 by int4 or fp4, and int8 by int4, "
                f"not {problem.a.dtype} by {problem.b.dtype}"
            )
        return self._stored(problem)

    def _supports(self, problem: Problem, target: Target) -> Support:
        fits = target.supports(problem.a.type) or problem.a.dtype in OCP_FP8
        return SUPPORTED if fits else Support(f"{target.name} has no {problem.a.dtype} (A); {fp8_of(target)}")

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: numbers times factors in bf16 are rounded to it."""
        return problem.c.type.epsilon + 2**-8 * self._rounded(problem) + 2**-12

    def typical_scale(self, problem: Problem) -> float:
        """Return the root mean square of the random scales; random operands then give a C of about one."""
        of_a = _INTEGERS if problem.a.dtype == "int8" else 1.0
        return float(2.0 ** -round(log2(SIZES[problem.b.dtype] * of_a * sqrt(problem.k)) / 2))

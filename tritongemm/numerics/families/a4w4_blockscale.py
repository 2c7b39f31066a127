"""Family: C = (A * scales) @ (B * scales), fp4 (e2m1) with a power of two for each 32 numbers along K (OCP MX).

Two numbers share a byte, the earlier one in its low half: A is [M, K / 2] bytes, B [K / 2, N], column-major. Scales are
e8m0 in the layout ``e8m0_32x8``, M and N padded to 32 rows and K / 32 to 8 groups, or (``mx``) [M, K / 32] and
[N, K / 32].
"""

from collections.abc import Mapping
from math import log2
from typing import ClassVar

from tritongemm.core.format_row import Defaults
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import StandardFamily, unpacked
from tritongemm.numerics.scale_factors import fp4_as_numbers, multiplied

_TYPICAL = 2.9  # root mean square of numbers whose bits are random


class MicroscaledFamily(StandardFamily):
    """C = (A * scale_a) @ (B * scale_b), a power of two for each 32 numbers along K."""

    summary = "fp4 with a scale for each 32 numbers along K (OCP MX), shuffled or, --scales mx, in rows"
    kinds = ("one", "batched", "grouped")
    defaults = Defaults.of("fp4e2m1", c="bf16", layout="TN")
    variants: ClassVar[Mapping[str, Defaults]] = {
        "a4w4_bpreshuffle": Defaults.of("fp4e2m1", c="bf16", layout="TN", order="shuffled_16x16")
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return e8m0 factors for each 32 numbers along K, of A and B, in that order or in rows."""
        return GRANULARITIES["mx_shuffled"], GRANULARITIES["mx"]

    def _types(self, problem: Problem) -> Support:
        if (problem.a.dtype, problem.b.dtype) != ("fp4e2m1", "fp4e2m1"):
            return Support(f"family a4w4_blockscale multiplies fp4 by fp4, not {problem.a.dtype} by {problem.b.dtype}")
        if problem.c.dtype not in ("bf16", "fp16"):
            return Support(f"family a4w4_blockscale gives bf16 or fp16, not {problem.c.dtype}")
        if problem.layout != "TN" or problem.bias != "none" or problem.k % 2:
            return Support("family a4w4_blockscale wants A row-major, B column-major (-col_b), an even K and no bias")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: products and their scales are exact in float32."""
        return problem.c.type.epsilon + 2**-12

    def input_deviation(self, problem: Problem) -> float:
        """Return the typical size of A and B."""
        return _TYPICAL

    def typical_scale(self, problem: Problem) -> float:
        """Return the root mean square of the random scales; random operands then give a C of about one."""
        return float(2.0 ** -round(log2(_TYPICAL) + log2(problem.k) / 4))

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N], of one product or a batch."""
        import torch

        of_a, of_b = operands["a"], unpacked(problem, operands["b"]).mT
        numbers = {"a": fp4_as_numbers(of_a, torch.float64), "b": fp4_as_numbers(of_b, torch.float64).mT}
        exact = multiplied(problem, operands | numbers)
        return exact["a"] @ exact["b"]

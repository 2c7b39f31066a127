"""Family: C = (A * scales) @ (B * scales) (+ bias), of fp8 or int8 with scales that change along K.

A float32 scale is for 128 numbers along K of a row of A, and for 128 x 128 numbers of B (``block``) or for 128 of a
column (``group``). Scales of A are stored as [K / 128, M], or (``block_rows``, ``group_rows``) as [M, K / 128], or
(``block_tma``, ``group_tma``) as [K / 128, M] with M padded to a multiple of 4. OCP's fp8 may have a power of two for
each 32 numbers along K instead (``mx``), of A [M, K / 32], of B [N, K / 32], or in the order of CDNA4's matrix
instructions (``mx_shuffled``).
"""

from collections.abc import Mapping
from math import sqrt
from typing import ClassVar

from tritongemm.core.format_row import Defaults
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import GRANULARITIES, ScalePair
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.numerics.families._standard import OCP_FP8, StandardFamily, unpacked
from tritongemm.numerics.scale_factors import multiplied
from tritongemm.numerics.verify import epilogue_reference

_RESULTS = ("bf16", "fp16", "fp32")
_ALONG_128 = ("block", "block_rows", "group", "group_rows", "block_tma", "group_tma")
_MX = ("mx", "mx_shuffled")
# With one scale along K the rounding of fp8's products, beside the root mean square of C, is this many times larger.
_OF_ONE_SCALE = 4.0


class BlockScaledFamily(StandardFamily):
    """C = (A * scale_a) @ (B * scale_b) (+ bias), scales for 128 numbers along K, or for 32."""

    summary = "fp8 or int8 with a scale for each 1 x 128 of A, 128 x 128 of B (--scales group: 1 x 128; mx: 1 x 32)"
    kinds = ("one", "batched", "grouped")
    defaults = Defaults.of("fp8", c="bf16", layout="TN")
    variants: ClassVar[Mapping[str, Defaults]] = {
        "a8w8_blockscale_bpreshuffle": Defaults.of("fp8", c="bf16", layout="TN", order="shuffled_16x16")
    }

    def scalings(self, dtype_a: str, dtype_b: str) -> tuple[ScalePair, ...]:
        """Return factors of B for 128 x 128 or 1 x 128 elements, in both orders, and of OCP's fp8 MX ones."""
        microscaled = _MX if {dtype_a, dtype_b} <= OCP_FP8 else ()
        return tuple(GRANULARITIES[name] for name in (*_ALONG_128, *microscaled))

    def _types(self, problem: Problem) -> Support:
        if problem.a.type != problem.b.type or not (problem.a.type.is_fp8 or problem.a.dtype == "int8"):
            return Support(
                f"family {self.name} multiplies one type of fp8 or int8, not {problem.a.dtype} by {problem.b.dtype}"
            )
        if problem.c.dtype not in _RESULTS and not problem.in_blocks:
            return Support(f"family {self.name} gives {', '.join(_RESULTS)}, not {problem.c.dtype}")
        return SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Return the largest error that is rounding rather than a fault: each 128 products are added up separately.

        With few scales along K some elements of C are far larger than the root mean square of all. Their rounding is
        too: matrix units of fp8 keep about 14 bits of a sum, and on an H100 the error was 0.014 with K = 256.
        """
        if not problem.a.type.is_fp8:
            return problem.c.type.epsilon + 2**-12
        scales_along_k = max(1.0, problem.k / (problem.scale_depth or problem.k))
        return problem.c.type.epsilon + 2**-8 * max(1.0, _OF_ONE_SCALE / sqrt(scales_along_k))

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """Return C in float64 [M, N] or [batch, M, N], of one product or a batch."""
        return epilogue_reference(problem, multiplied(problem, operands | {"b": unpacked(problem, operands["b"])}))

"""Family: C = (A * scales) @ (B * scales), of fp8 with float32 scales.

A scale is for 128 numbers along K of a row of A, or for 128 x 128 numbers of B.

The scales of A lie as [K / 128, M], those of B as [N / 128, K / 128].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import Scaling
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._standard import StandardFamily, readable, unpacked
from tritongemm.plugins.contracts import FamilyDefaults

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 128  # numbers along K, and columns of B, that share a scale


class BlockScaledFamily(StandardFamily):
    """C = (A * scale_a) @ (B * scale_b), a scale for 1 x 128 of A and for 128 x 128 of B."""

    summary = "fp8 with a scale for each 1 x 128 of A and each 128 x 128 of B"
    defaults = FamilyDefaults(dtype_a="fp8", dtype_c="bf16")
    variants: ClassVar[Mapping[str, FamilyDefaults]] = {
        "a8w8_blockscale_bpreshuffle": FamilyDefaults(dtype_a="fp8", dtype_c="bf16", order_b="shuffled_16x16")
    }

    def scaling(self, dtype_a: str, dtype_b: str) -> tuple[Scaling, Scaling]:
        """Float32 factors of A, [K / 128, M], and of B, [N / 128, K / 128]."""
        return Scaling(depth=GROUP, layout="groups"), Scaling(rows=GROUP, depth=GROUP)

    def _types(self, problem: Problem, target: Target) -> Support:
        if not (problem.a == problem.b and problem.a.is_fp8):
            return Support(f"family {self.name} multiplies one type of fp8, not {problem.dtype_a} by {problem.dtype_b}")
        if problem.dtype_c not in ("bf16", "fp16") or problem.bias != "none" or problem.k % GROUP:
            return Support(f"family {self.name} gives bf16 or fp16, wants K a multiple of {GROUP} and no bias")
        return readable(problem, target)

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault."""
        return problem.c.epsilon + 2**-6

    def typical_scale(self, problem: Problem) -> float:
        """Middle of the random scales; random operands then give a C of about one."""
        middle: float = round(problem.k**-0.25, 6)
        return middle

    def _reference(self, problem: Problem, operands: Operands) -> Tensor:
        """C in float64 [M, N] of one product."""
        of_a = operands["scale_a"].double().T.repeat_interleave(GROUP, 1)
        of_b = operands["scale_b"].double().repeat_interleave(GROUP, 0)[: problem.n].repeat_interleave(GROUP, 1)
        b = unpacked(problem, operands["b"]).double()
        return (operands["a"].double() * of_a) @ (b * of_b.T)

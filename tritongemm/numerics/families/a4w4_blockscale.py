"""Family: C = (A * scales) @ (B * scales), fp4 (e2m1) with a power of two for each 32 numbers along K (OCP MX).

Two numbers share a byte, the earlier one in its low half: A is [M, K / 2] bytes, B [K / 2, N], column-major. Scales are
e8m0 in the layout ``e8m0_32x8``, M and N padded to 32 rows and K / 32 to 8 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import ScalePair, Scaling
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.numerics.families._standard import order_of_b, packed, unpacked
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, FamilyDefaults, ScaleLayout

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32  # numbers along K that share a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same below zero
_BIAS = 127  # of the exponents
_LEAST = -6  # random scales are 2**-6 to 1, which keeps C in the range of fp16
_LAYOUT = "e8m0_32x8"


class MicroscaledFamily(Family):
    """C = (A * scale_a) @ (B * scale_b), a power of two for each 32 numbers along K."""

    summary = "fp4 with a scale for each 32 numbers along K (OCP MX)"
    defaults = FamilyDefaults(dtype_a="fp4e2m1", dtype_c="bf16")
    variants: ClassVar[Mapping[str, FamilyDefaults]] = {
        "a4w4_bpreshuffle": FamilyDefaults(dtype_a="fp4e2m1", dtype_c="bf16", order_b="shuffled_16x16")
    }

    def scaling(self, dtype_a: str, dtype_b: str) -> ScalePair:
        """An e8m0 factor for each 32 numbers along K, of A and of B."""
        one = Scaling("e8m0", 1, GROUP, _LAYOUT, (32, 8))
        return one, one

    def _supports(self, problem: Problem, target: Target) -> Support:
        if (problem.dtype_a, problem.dtype_b) != ("fp4e2m1", "fp4e2m1"):
            return Support(f"family a4w4_blockscale multiplies fp4 by fp4, not {problem.dtype_a} by {problem.dtype_b}")
        if problem.dtype_c not in ("bf16", "fp16"):
            return Support(f"family a4w4_blockscale gives bf16 or fp16, not {problem.dtype_c}")
        if problem.layout != "TN" or problem.bias != "none" or problem.k % 2:
            return Support("family a4w4_blockscale wants A row-major, B column-major (-col_b), an even K and no bias")
        if not target.supports(problem.a):
            return Support(f"{target.name} has no matrix instruction for fp4")
        return order_of_b(problem) and SUPPORTED

    def tolerance(self, problem: Problem) -> float:
        """Largest error that is rounding rather than a fault: products and their scales are exact in float32."""
        return problem.c.epsilon + 2**-12

    def input_deviation(self, problem: Problem) -> float:
        """Typical size of A and B."""
        return 1.0

    def make_inputs(self, problem: Problem, device: str, distribution: str = "randn", seed: int = 0) -> Operands:
        """Random operands as bytes; every bit pattern is a number. ``zeros`` makes A and B zero, others are alike."""
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)

        def random(rows: int, cols: int, low: int, high: int) -> Tensor:
            return torch.randint(low, high, (rows, cols), generator=generator, device=device, dtype=torch.uint8)

        most = 1 if distribution == "zeros" else 256
        a = random(problem.m, problem.k // 2, 0, most)
        b = packed(problem, random(problem.n, problem.k // 2, 0, most).T)
        exponents = _BIAS + _LEAST, _BIAS + 1
        scales = {e.name: random(e.shape[0], e.shape[1], *exponents) for e in problem.extras}
        return {"a": a, "b": b} | scales

    def reference(self, problem: Problem, operands: Operands) -> Tensor:
        """C in float64 [M, N]."""
        b = unpacked(problem, operands["b"])
        left = _numbers(operands["a"]) * _factors(operands["scale_a"], problem.m, problem.k)
        right = _numbers(b.T) * _factors(operands["scale_b"], problem.n, problem.k)
        return left @ right.T


def _numbers(packed_bytes: Tensor) -> Tensor:
    """[rows, K] in float64 of [rows, K / 2] bytes."""
    import torch

    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float64, device=packed_bytes.device)
    halves = torch.stack((packed_bytes & 15, packed_bytes >> 4), -1).reshape(packed_bytes.shape[0], -1)
    return values[halves.long()]


def _factors(scales: Tensor, rows: int, k: int) -> Tensor:
    exponents = registry.get(ScaleLayout, _LAYOUT).unpack(scales)[:rows].double() - _BIAS
    return exponents.exp2().repeat_interleave(GROUP, 1)[:, :k]

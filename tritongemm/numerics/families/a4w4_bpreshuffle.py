"""Family: as a4w4_blockscale, with B shuffled beforehand, as most of AITER's assembly kernels for fp4 read it."""

from __future__ import annotations

from tritongemm.numerics.families import a4w4_blockscale
from tritongemm.numerics.families.a4w4_blockscale import deviation, extras, outside, scale, tolerance
from tritongemm.numerics.weight_layouts import shuffled_16x16

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = a4w4_blockscale.DTYPE_A, a4w4_blockscale.DTYPE_C
SHUFFLED_B = True
unsupported, inputs, reference = shuffled_16x16.of(a4w4_blockscale)

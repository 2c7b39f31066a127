"""Family: as a4w4_blockscale, with B shuffled beforehand, as most of AITER's assembly kernels for fp4 read it."""

from tritongemm.families import _shuffled, a4w4_blockscale
from tritongemm.families.a4w4_blockscale import deviation, extras, outside, scale, tolerance

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = a4w4_blockscale.DTYPE_A, a4w4_blockscale.DTYPE_C
SHUFFLED_B = True
unsupported, inputs, reference = _shuffled.of(a4w4_blockscale)

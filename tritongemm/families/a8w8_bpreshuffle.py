"""Family: as a8w8, with B shuffled beforehand, as AITER's assembly kernels for int8 read it."""

from tritongemm.families import _shuffled, a8w8
from tritongemm.families.a8w8 import deviation, extras, outside, scale, tolerance

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "int8", "bf16"  # where nothing else is said
SHUFFLED_B = True
unsupported, inputs, reference = _shuffled.of(a8w8)

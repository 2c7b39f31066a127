"""Family: as a8w8, with B shuffled beforehand, as AITER's assembly kernels for int8 read it."""

from __future__ import annotations

from tritongemm.numerics.families import a8w8
from tritongemm.numerics.families.a8w8 import deviation, extras, outside, scale, tolerance
from tritongemm.numerics.weight_layouts import shuffled_16x16

__all__ = ["deviation", "extras", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A, DTYPE_C = "int8", "bf16"  # where nothing else is said
SHUFFLED_B = True
unsupported, inputs, reference = shuffled_16x16.of(a8w8)

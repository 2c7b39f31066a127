"""Family: as dense, with B shuffled beforehand, as some of AITER's assembly kernels for bf16 read it."""

from __future__ import annotations

from tritongemm.numerics.families import dense
from tritongemm.numerics.families.dense import deviation, outside, scale, tolerance
from tritongemm.numerics.weight_layouts import shuffled_16x16

__all__ = ["deviation", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A = "bf16"  # where nothing else is said
SHUFFLED_B = True
unsupported, inputs, reference = shuffled_16x16.of(dense)

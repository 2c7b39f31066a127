"""Family: as dense, with B shuffled beforehand, as some of AITER's assembly kernels for bf16 read it."""

from tritongemm.families import _shuffled, dense
from tritongemm.families.dense import deviation, outside, scale, tolerance

__all__ = ["deviation", "inputs", "outside", "reference", "scale", "tolerance", "unsupported"]
DTYPE_A = "bf16"  # where nothing else is said
SHUFFLED_B = True
unsupported, inputs, reference = _shuffled.of(dense)

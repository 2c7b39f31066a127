"""The noun `Rounding`: the power of two that numbers are divided by so that a type holds them (OCP MX)."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

from tritongemm.core.dtypes import DTYPES

MANTISSA_BITS = 23  # of float32


@dataclass(frozen=True)
class Rounding:
    """How the largest value of 32 becomes an exponent: bits of a float32, plus `carry`, shifted, less `less`."""

    carry: int
    less: int

    @classmethod
    def of(cls, dtype: str) -> Rounding:
        """That of a type, by our name: the least power with which none of the values is above its largest number."""
        fraction, exponent = frexp(DTYPES[dtype].maximum)
        mantissa = int((2 * fraction - 1) * 2**MANTISSA_BITS)
        return cls(2**MANTISSA_BITS - 1 - mantissa, exponent - 1)

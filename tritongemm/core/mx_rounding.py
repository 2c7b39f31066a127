"""The noun `Rounding`: the power of two that numbers are divided by so that a type holds them (OCP MX)."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

from tritongemm.core.dtypes import DTYPES

MANTISSA_BITS = 23  # of float32


@dataclass(frozen=True)
class Rounding:
    """How the largest absolute value of a group becomes an exponent, without a logarithm.

    Attributes:
        carry: added to the bits of that value as a float32, so that they are shifted to a rounded exponent.
        less: taken off that exponent: the exponent of the type's own largest number.
    """

    carry: int
    less: int

    @classmethod
    def of(cls, dtype: str) -> Rounding:
        """The rounding of a type, by our name, to the least power that brings all values within its largest number."""
        fraction, exponent = frexp(DTYPES[dtype].maximum)
        mantissa = int((2 * fraction - 1) * 2**MANTISSA_BITS)
        return cls(2**MANTISSA_BITS - 1 - mantissa, exponent - 1)

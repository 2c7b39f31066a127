"""Element types and their names in Triton, PyTorch and on the command line."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from math import frexp

from tritongemm.core.errors import InputError


@dataclass(frozen=True)
class DType:
    """An element type."""

    name: str  # our name, as on the command line
    bytes: int  # size of one element, or of `packed` of them
    triton: str  # Triton's name in a signature, e.g. `fp8e4nv`; of types that it has not, of their bytes
    torch: str  # attribute of `torch`, e.g. `float8_e4m3fn`
    epsilon: float  # spacing of the numbers just above 1 (0 for integers)
    maximum: float  # largest finite value
    packed: int = 1  # elements that share their bytes

    @property
    def width(self) -> float:
        """Size of one element in bytes, a half where two share one."""
        return self.bytes / self.packed

    @property
    def is_fp8(self) -> bool:
        """Whether it is one of the formats of 8 bits with an exponent."""
        return self.name.startswith("fp8")

    @property
    def is_integer(self) -> bool:
        """Whether its products and sums are exact."""
        return self.name.startswith("int")


DTYPES = {
    d.name: d
    for d in (
        DType("fp16", 2, "fp16", "float16", 2**-10, 65504.0),
        DType("bf16", 2, "bf16", "bfloat16", 2**-7, 3.3895313892515355e38),
        DType("fp32", 4, "fp32", "float32", 2**-23, 3.4028234663852886e38),
        DType("fp8e4m3fn", 1, "fp8e4nv", "float8_e4m3fn", 2**-3, 448.0),
        DType("fp8e4m3fnuz", 1, "fp8e4b8", "float8_e4m3fnuz", 2**-3, 240.0),
        DType("fp8e5m2", 1, "fp8e5", "float8_e5m2", 2**-2, 57344.0),
        DType("fp8e5m2fnuz", 1, "fp8e5b16", "float8_e5m2fnuz", 2**-2, 57344.0),
        DType("fp4e2m1", 1, "u8", "float4_e2m1fn_x2", 2**-1, 6.0, packed=2),
        DType("int4", 1, "u8", "uint4", 0.0, 7.0, packed=2),
        DType("e8m0", 1, "u8", "float8_e8m0fnu", 1.0, 2.0**127),
        DType("int8", 1, "i8", "int8", 0.0, 127.0),
        DType("int32", 4, "i32", "int32", 0.0, 2147483647.0),
    )
}

ALIASES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "tf32": "fp32", "i8": "int8",
    "i32": "int32", "f16": "fp16", "f32": "fp32",
    "fp4": "fp4e2m1", "e2m1": "fp4e2m1", "float4_e2m1fn_x2": "fp4e2m1", "float8_e8m0fnu": "e8m0",
    "e4m3fn": "fp8e4m3fn", "e4m3fnuz": "fp8e4m3fnuz", "e5m2fnuz": "fp8e5m2fnuz",
    "float8_e4m3fn": "fp8e4m3fn", "float8_e4m3fnuz": "fp8e4m3fnuz", "float8_e5m2": "fp8e5m2",
    "float8_e5m2fnuz": "fp8e5m2fnuz",
}  # fmt: skip

E8M0_BIAS = 127  # An e8m0 byte is the exponent of a power of two plus this.
E8M0_NAN = 255  # The e8m0 byte that is no number.
INT4_ZERO = 8  # The bits of int4 are a number plus this, as in checkpoints whose weights have no zero points.

# Names without an encoding mean the one the target's matrix units read.
BY_ENCODING = {
    "fp8": {"fn": "fp8e4m3fn", "fnuz": "fp8e4m3fnuz"},
    "e4m3": {"fn": "fp8e4m3fn", "fnuz": "fp8e4m3fnuz"},
    "fp8e4m3": {"fn": "fp8e4m3fn", "fnuz": "fp8e4m3fnuz"},
    "bf8": {"fn": "fp8e5m2", "fnuz": "fp8e5m2fnuz"},
    "e5m2": {"fn": "fp8e5m2", "fnuz": "fp8e5m2fnuz"},
}


def dtype(name: str, fp8_encoding: str = "fn") -> DType:
    """Return the type of a name or alias, ``torch.``-prefixed or not; an InputError lists those there are.

    `fp8_encoding` is ``fn`` (OCP) or ``fnuz`` (gfx942), for names that leave it open.
    """
    key = str(name).lower().removeprefix("torch.")
    key = BY_ENCODING.get(key, {}).get(fp8_encoding, ALIASES.get(key, key))
    if key not in DTYPES:
        raise InputError(f"unknown dtype {reprlib.repr(name)}; there are: {', '.join([*DTYPES, *BY_ENCODING])}")
    return DTYPES[key]


MANTISSA_BITS = 23  # of float32


@dataclass(frozen=True)
class Rounding:
    """The rounding of the largest absolute value of a group to an exponent, without a logarithm."""

    carry: int  # added to the bits of that value as a float32, so that they are shifted to a rounded exponent
    less: int  # taken off that exponent: the exponent of the type's own largest number

    @classmethod
    def of(cls, dtype: str) -> Rounding:
        """Return a type's rounding by our name to the least power that brings all values within its largest number."""
        fraction, exponent = frexp(DTYPES[dtype].maximum)
        return cls(2**MANTISSA_BITS - 1 - int((2 * fraction - 1) * 2**MANTISSA_BITS), exponent - 1)

"""The noun `HelperKernel`: a kernel beside the products, e.g. one that quantises their operands, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS = 256  # most values of float32 that one kernel leaves to the next, at an address named part


@dataclass(frozen=True)
class HelperKernel:
    """A kernel that is compiled from a text as it is.

    Attributes:
        name: of the function in the text.
        source: a module of kernels.
        signature: types of its run-time parameters in order: ``*`` and a type for a pointer, a type for a number.
        constants: values of the other parameters.
        divisors: powers of two that numbers among the parameters are multiples of.
        num_warps: warps (NVIDIA) or waves (AMD) of a program.
        overlaps: it takes WAIT and NEXT, the assembly by which consecutive kernels overlap, and waits for the one
            before it.
    """

    name: str
    source: str = field(repr=False)
    signature: Mapping[str, str] = field(hash=False)
    constants: Mapping[str, float] = field(hash=False)
    divisors: Mapping[str, int] = field(hash=False, default_factory=dict)
    num_warps: int = 4
    overlaps: bool = False


@dataclass(frozen=True)
class HelperArguments:
    """What one launch of a helper kernel is given.

    Attributes:
        grid: programs along x, y, z.
        numbers: values of the parameters that are no pointers.
    """

    grid: tuple[int, int, int]
    numbers: Mapping[str, int] = field(hash=False)

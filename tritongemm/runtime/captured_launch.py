"""A library's call → the kernels that it launches, as a function of where its operands lie.

The call is captured, not run, with its operands at made-up addresses: what differs between two captures must be such an
address and a fixed distance from it, and a third, on another stream, must be as foretold, byte for byte. Launching these
kernels ourselves then is what the library does, without what it does to get there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from tritongemm.hip_ext.driver import driver, graph_capture
from tritongemm.hip_ext.driver.graph_capture import Captured, Cleared
from tritongemm.runtime.patched_launch import WORD, PatchedLaunch, in_order, patching, words

Queue = Callable[[Mapping[str, int], int], object]


@dataclass(frozen=True)
class CapturedKernel:
    """One kernel of a call, or memory that it sets to zero.

    Attributes:
        kernel: its launch with the operands somewhere.
        places: by operand, offsets in the parameter block and what is added to its address there.
    """

    kernel: Captured | Cleared
    places: Mapping[str, tuple[tuple[int, int], ...]]

    def at(self, addresses: Mapping[str, int]) -> Captured | Cleared:
        """The launch with the operands at these addresses."""
        block = bytearray(self.kernel.params)
        for name, places in self.places.items():
            for offset, distance in places:
                struct.pack_into("<Q", block, offset, addresses[name] + distance)
        return replace(self.kernel, params=bytes(block))


def capture_launches(device: driver.Device, names: Sequence[str], queue: Queue) -> tuple[CapturedKernel, ...] | None:
    """What a call launches.

    Args:
        device: the current one.
        names: the call's operands.
        queue: the call; takes their addresses by name, and the handle of a stream.

    Returns:
        None where this driver can't tell, or it is more than kernels one after another that differ by addresses.

    Raises:
        DriverError: the driver or the library refused something.
        UnavailableError: the driver is too old to tell.
    """
    if not graph_capture.available(device.api):
        return None
    found = []
    with ExitStack() as streams:
        streams.callback((here := device.stream()).destroy)
        streams.callback((there := device.stream()).destroy)
        for trial, stream in enumerate((here, here, there)):
            at = _addresses(names, trial)
            launches = graph_capture.captured_launches(device.api, stream.handle, partial(queue, at, stream.handle))
            if not launches:
                return None
            found.append((at, launches))
    (first, one), (second, two), (third, three) = found
    if not len(one) == len(two) == len(three):
        return None
    known: list[CapturedKernel] = []
    for x, y, z in zip(one, two, three, strict=True):
        kernel = _compared(x, first, y, second)
        if kernel is None or kernel.at(third) != z:
            return None
        known.append(kernel)
    return tuple(known)


def _addresses(names: Sequence[str], trial: int) -> dict[str, int]:
    """Made-up addresses: far apart, and so uneven that nothing else looks like one or like a difference of two."""
    uneven = (0x1D3F0, 0x2B75A10, 0x35CC2D40)[trial]
    found = {
        name: ((trial + 1) << 40) + ((i + 1) << 36) + uneven * (i + 3) // 256 * 256 for i, name in enumerate(names)
    }
    # A workspace always starts at a multiple of 256 bytes; operands are promised multiples of 16 alone.
    return {n: a if n == "workspace" or trial < 2 else a + 16 for n, a in found.items()}


def _compared(
    x: Captured | Cleared, first: Mapping[str, int], y: Captured | Cleared, second: Mapping[str, int]
) -> CapturedKernel | None:
    """One kernel of two captures, or None where more than addresses differ."""
    if replace(x, params=b"") != replace(y, params=b"") or len(x.params) != len(y.params):
        return None
    places: dict[str, list[tuple[int, int]]] = {}
    for offset in range(0, len(x.params), WORD):
        a, b = (int.from_bytes(k.params[offset : offset + WORD], "little") for k in (x, y))
        if a != b:
            name = next((n for n in first if a - first[n] == b - second[n]), None)
            if name is None:
                return None
            places.setdefault(name, []).append((offset, a - first[name]))
    return CapturedKernel(x, {name: tuple(found) for name, found in places.items()})


def bind(device: driver.Device, kernels: Sequence[CapturedKernel]) -> PatchedLaunch:
    """The kernels, ready to be launched with their operands anywhere; for one thread."""
    prepared = [k.kernel.prepare(device.api) for k in kernels]
    places: dict[str, list[tuple[memoryview, int, int]]] = {}
    for launch, kernel in zip(prepared, kernels, strict=True):
        block = words(launch.params)
        for name, found in kernel.places.items():
            places.setdefault(name, []).extend((block, offset, distance) for offset, distance in found)
    return PatchedLaunch(
        {name: patching(found) for name, found in places.items()}, in_order([launch.launch for launch in prepared])
    )

"""Captures the kernels that a library's call launches, as a function of its operands' addresses.

The call is captured, not run, with its operands at made-up addresses. What differs between two captures must be such an
address plus a fixed distance, and a third capture, on another stream, must be as predicted, byte for byte. Launching
these kernels directly then does what the library does, without the work that it does to get there.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from tritongemm.core.served_call import LaunchSteps, PatchedLaunch
from tritongemm.hip_ext.driver import driver, graph_capture
from tritongemm.hip_ext.driver.graph_capture import Captured, Cleared
from tritongemm.hip_ext.launching.patched_launch import WORD_BYTES, address_writers, call_all

QueueCall = Callable[[Mapping[str, int], int], object]


@dataclass(frozen=True)
class CapturedKernel:
    """One kernel of a call, or memory that it sets to zero."""

    kernel: Captured | Cleared  # its launch with the operands at made-up addresses
    # By operand, offsets in the parameter block in bytes, and what is added to its address there.
    address_slots: Mapping[str, tuple[tuple[int, int], ...]]

    def at(self, addresses: Mapping[str, int]) -> Captured | Cleared:
        """Return the launch with the operands at these addresses."""
        block = bytearray(self.kernel.params)
        for name, slots in self.address_slots.items():
            for offset, distance in slots:
                struct.pack_into("<Q", block, offset, addresses[name] + distance)
        return replace(self.kernel, params=bytes(block))


def capture_launches(
    device: driver.Device, names: Sequence[str], queue: QueueCall
) -> tuple[CapturedKernel, ...] | None:
    """Return the kernels in order that a call launches on the current device.

    The call takes the addresses of its operands by name, and the handle of a stream. None where this driver can't, or
    where it does more than launch kernels one after another that differ by addresses alone.
    """
    if not graph_capture.available(device.api):
        return None
    captures = []
    with ExitStack() as streams:
        streams.callback((stream := device.stream()).destroy)
        streams.callback((other_stream := device.stream()).destroy)
        for trial, used in enumerate((stream, stream, other_stream)):
            addresses = _made_up_addresses(names, trial)
            launches = graph_capture.captured_launches(device.api, used.handle, partial(queue, addresses, used.handle))
            if not launches:
                return None
            captures.append((addresses, launches))
    (first, one), (second, two), (third, three) = captures
    if not len(one) == len(two) == len(three):
        return None
    kernels: list[CapturedKernel] = []
    for x, y, z in zip(one, two, three, strict=True):
        kernel = _compare(x, first, y, second)
        if kernel is None or kernel.at(third) != z:
            return None
        kernels.append(kernel)
    return tuple(kernels)


def _made_up_addresses(names: Sequence[str], trial: int) -> dict[str, int]:
    """Return addresses far apart, and so uneven that no other number looks like one or like a difference of two."""
    uneven = (0x1D3F0, 0x2B75A10, 0x35CC2D40)[trial]
    addresses = {
        name: ((trial + 1) << 40) + ((i + 1) << 36) + uneven * (i + 3) // 256 * 256 for i, name in enumerate(names)
    }
    # A workspace always starts at a multiple of 256 bytes; operands are only promised multiples of 16.
    return {n: a if n == "workspace" or trial < 2 else a + 16 for n, a in addresses.items()}


def _compare(
    x: Captured | Cleared, first: Mapping[str, int], y: Captured | Cleared, second: Mapping[str, int]
) -> CapturedKernel | None:
    """Return the kernel that two captures show, or None where they differ in more than addresses."""
    if replace(x, params=b"") != replace(y, params=b"") or len(x.params) != len(y.params):
        return None
    slots: dict[str, list[tuple[int, int]]] = {}
    for offset in range(0, len(x.params), WORD_BYTES):
        a, b = (int.from_bytes(k.params[offset : offset + WORD_BYTES], "little") for k in (x, y))
        if a != b:
            name = next((n for n in first if a - first[n] == b - second[n]), None)
            if name is None:
                return None
            slots.setdefault(name, []).append((offset, a - first[name]))
    return CapturedKernel(x, {name: tuple(found) for name, found in slots.items()})


def prepare_captured(device: driver.Device, kernels: Sequence[CapturedKernel]) -> PatchedLaunch:
    """Return a launch of captured kernels with their operands anywhere; for one thread."""
    prepared = [k.kernel.prepare(device.api) for k in kernels]
    slots: dict[str, list[tuple[int, int, int]]] = {}
    for step, kernel in enumerate(kernels):
        for name, offsets in kernel.address_slots.items():
            slots.setdefault(name, []).extend((step, offset, distance) for offset, distance in offsets)
    steps = LaunchSteps(prepared, slots)
    return PatchedLaunch(address_writers(steps), call_all([one.launch for one in prepared]), steps)

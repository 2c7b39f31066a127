"""Writes addresses into a prepared launch's parameter block, and zeroes memory before a kernel that adds into it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tritongemm.core.launch import Buffer

WORD_BYTES = 8  # of an address


def as_words(block: bytearray) -> memoryview:
    """Return a parameter block as words of 8 bytes, the fastest form to write an address to many places."""
    return memoryview(block)[: len(block) // WORD_BYTES * WORD_BYTES].cast("Q")


def address_writer(slots: Sequence[tuple[memoryview, int, int]]) -> Callable[[int], None]:
    """Return a function that writes an address to all its places.

    Args:
        slots: the words of a block, the offset in bytes there, a multiple of 8, and what is added to the address.
    """
    indexed = [(block, offset // WORD_BYTES, distance) for block, offset, distance in slots]

    def write(address: int) -> None:
        for block, index, distance in indexed:
            block[index] = address + distance

    return write


def call_all(functions: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """Return a function that calls all of these with its own argument, one after the other."""
    if len(functions) == 1:
        return functions[0]

    def call(argument: int) -> None:
        for function in functions:
            function(argument)

    return call


class MemoryFiller(Protocol):
    """Fills device memory, e.g. the driver's device."""

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        """Fill with one byte value, in stream order."""


class ZeroedLaunch:
    """Fills and a launch on one stream, which may be captured together; belongs to one thread."""

    def __init__(self, device: MemoryFiller, buffers: Sequence[Buffer], launch: Callable[[int], object]) -> None:
        self._device, self._buffers, self._launch = device, tuple(buffers), launch
        self._addresses = dict.fromkeys((buffer.name for buffer in buffers), 0)

    def set_address(self, name: str, address: int) -> None:
        """Set the address of a buffer."""
        self._addresses[name] = address

    def __call__(self, stream: int) -> None:
        """Queue the fills and then the kernel on the stream of a handle."""
        for buffer in self._buffers:
            self._device.memset(self._addresses[buffer.name], 0, buffer.bytes, stream)
        self._launch(stream)

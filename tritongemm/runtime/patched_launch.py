"""Writes addresses into a prepared launch's parameter block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

"""Launches a kernel that adds into memory, which is set to zero before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tritongemm.core.launch import Buffer


class MemoryFiller(Protocol):
    """Fills device memory, e.g. the driver's device."""

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        """Fill with one byte value, in stream order."""


class ZeroedLaunch:
    """Fills and a launch on one stream, which may be captured together; belongs to one thread.

    Args:
        device: fills the memory.
        buffers: what is set to zero before each launch.
        launch: queues the kernel on the stream of a handle.
    """

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

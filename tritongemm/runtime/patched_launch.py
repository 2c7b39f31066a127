"""A launch made ready whose addresses can be replaced, whatever it launches; belongs to one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tritongemm.core.record import Record
    from tritongemm.hip_ext.driver import driver
    from tritongemm.runtime.workspaces import WorkspacePool

WORD = 8  # bytes


def words(block: bytearray) -> memoryview:
    """A parameter block as whole words, to be patched: an address can have a dozen places, and this is the fastest way."""
    return memoryview(block)[: len(block) // WORD * WORD].cast("Q")


def patching(places: Sequence[tuple[memoryview, int, int]]) -> Callable[[int], None]:
    """What writes an address to its places.

    Args:
        places: a block's words, the byte there, a multiple of 8, and what is added to the address.
    """
    found = [(block, offset // WORD, distance) for block, offset, distance in places]

    def put(address: int) -> None:
        for block, index, distance in found:
            block[index] = address + distance

    return put


def in_order(calls: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """One call that passes its argument to all of these, one after the other."""
    if len(calls) == 1:
        return calls[0]

    def call(argument: int) -> None:
        for each in calls:
            each(argument)

    return call


@dataclass(frozen=True)
class PatchedLaunch:
    """A launch at addresses that are still to be given.

    Attributes:
        places: what takes the address of ``a``, ``b``, ``c``, ``bias``, ``workspace`` or ``semaphore``; one that is
            missing is not used.
        launch: queues it on the stream of a handle.
    """

    places: Mapping[str, Callable[[int], None]]
    launch: Callable[[int], None]

    def put(self, name: str) -> Callable[[int], None]:
        """What takes the address of one buffer."""
        return self.places.get(name, lambda address: None)


class LoadedKernel(Protocol):
    """What can be made ready: a kernel or a library's algorithm that is loaded."""

    def bytes(self, buffer: str) -> int: ...
    def bind(self, device: driver.Device) -> PatchedLaunch: ...


class TunedLoadedKernel(LoadedKernel, Protocol):
    """One that won the tuning."""

    @property
    def record(self) -> Record: ...


class ServingDevice(Protocol):
    """The device that it is loaded on, as PyTorch counts it, names it, and as its driver does; what kernels share there."""

    index: int
    arch: str
    place: torch.device
    device: driver.Device
    scratch: WorkspacePool | None

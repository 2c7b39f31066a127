"""The nouns of serving that a backend must know: a loaded kernel, and its launch at addresses that are still to be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PatchedLaunch:
    """A launch at addresses that are still to be given; belongs to one thread.

    Attributes:
        setters: what takes the address of ``a``, ``b``, ``c``, ``bias``, ``workspace`` or ``semaphore``; one that is
            missing is not used.
        launch: queues it on the stream of a handle.
    """

    setters: Mapping[str, Callable[[int], None]]
    launch: Callable[[int], None]

    def set_address(self, name: str) -> Callable[[int], None]:
        """What takes the address of one buffer."""
        return self.setters.get(name, lambda address: None)


class LoadedKernel(Protocol):
    """A kernel or a library's algorithm that is loaded on a device."""

    def bytes(self, buffer: str) -> int:
        """Bytes of a buffer that the runtime owns: ``workspace`` or ``semaphore``."""

    def prepare(self, device: Any) -> PatchedLaunch:
        """A launch for one thread; `device` is the driver's (`hip_ext.driver.driver.Device`)."""

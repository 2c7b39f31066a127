"""A launch made ready whose addresses can be replaced, whatever it launches; belongs to one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
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

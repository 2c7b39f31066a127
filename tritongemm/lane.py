"""One judge's thread: what is queued for it, in order, many things at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 256  # things taken at a time


class Lane(Generic[T]):
    """A thread that works off a queue.

    Args:
        work: is given what has been queued meanwhile, at least one thing. What it raises ends the thread.
    """

    def __init__(self, work: Callable[[list[T]], None]) -> None:
        self._work = work
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, thing: T) -> None:
        """Queue a thing.

        Raises:
            BaseException: what `work` raised over an earlier one, so that nobody makes more for a thread that ended.
        """
        if self._fault is not None:
            raise self._fault
        self._queue.put(thing)

    def close(self) -> None:
        """Wait until all is done.

        Raises:
            BaseException: what `work` raised.
        """
        self._queue.put(None)
        self._thread.join()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            while True:
                taken = [self._queue.get()]
                while not self._queue.empty() and len(taken) < MOST:
                    taken.append(self._queue.get())
                things = [t for t in taken if t is not None]
                if things:
                    self._work(things)
                if len(things) < len(taken):
                    return
        except BaseException as error:
            self._fault = error

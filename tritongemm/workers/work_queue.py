"""One judge's thread: what is queued for it, in order, many things at a time; what can wait is done when nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 256  # things taken at a time
_NOW, _LATER, _END = range(3)


class WorkQueue(Generic[T]):
    """A thread that works off a queue.

    Args:
        work: is given what has been queued meanwhile, at least one thing. What it raises ends the thread.
    """

    def __init__(self, work: Callable[[list[T]], None]) -> None:
        self._work = work
        self._queue: PriorityQueue[tuple[int, int, T | threading.Event | None]] = PriorityQueue()
        self._places = count()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, thing: T, later: bool = False) -> None:
        """Queue a thing; one for `later` waits until there is nothing else to do, and is worked off alone.

        Raises:
            BaseException: what `work` raised over an earlier one, so that nobody makes more for a thread that ended.
        """
        self._check()
        self._put(_LATER if later else _NOW, thing)

    def wait(self) -> None:
        """Wait until all that was queued is done, but for what can wait.

        Raises:
            BaseException: what `work` raised.
        """
        reached = threading.Event()
        self._put(_NOW, reached)
        while self._thread.is_alive() and not reached.wait(0.1):
            pass
        self._check()

    def close(self) -> None:
        """Wait until all is done.

        Raises:
            BaseException: what `work` raised.
        """
        self._put(_END, None)
        self._thread.join()
        self._check()

    def _put(self, when: int, thing: T | threading.Event | None) -> None:
        self._queue.put((when, next(self._places), thing))

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            while True:
                when, _, thing = self._queue.get()
                if thing is None:
                    return
                taken = [thing]
                # Nobody else takes anything, so what is first stays, or makes room for what is more urgent.
                while when == _NOW and len(taken) < MOST and self._queue.queue and self._queue.queue[0][0] == _NOW:
                    _, _, thing = self._queue.get()
                    assert thing is not None
                    taken.append(thing)
                things = [t for t in taken if not isinstance(t, threading.Event)]
                if things:
                    self._work(things)
                for reached in taken:
                    if isinstance(reached, threading.Event):
                        reached.set()
        except BaseException as error:
            self._fault = error

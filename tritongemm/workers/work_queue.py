"""A thread that works off a queue: many items at a time, in order, and those that can wait when there are no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_ITEMS = 256  # The thread takes at most so many items at a time.
_NOW, _LATER, _END = range(3)  # Priorities in the queue, the most urgent first.


class WorkQueue(Generic[T]):
    """A thread that works off a queue.

    Args:
        work: is given the items that have been queued meanwhile, at least one. What it raises ends the thread.
    """

    def __init__(self, work: Callable[[list[T]], None]) -> None:
        self._work = work
        self._queue: PriorityQueue[tuple[int, int, T | threading.Event | None]] = PriorityQueue()
        self._numbers = count()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, item: T, later: bool = False) -> None:
        """Queue an item.

        Args:
            item: what `work` is given.
            later: it waits until there are no other items, and is worked off alone.

        Raises:
            BaseException: what `work` raised over an earlier item: the thread has ended.
        """
        self._check()
        self._put(_LATER if later else _NOW, item)

    def wait(self) -> None:
        """Wait until all that was queued is done, except items queued for later.

        Raises:
            BaseException: what `work` raised.
        """
        reached = threading.Event()
        self._put(_NOW, reached)
        while self._thread.is_alive() and not reached.wait(0.1):
            pass
        self._check()

    def close(self) -> None:
        """Wait until all items are done, and end the thread.

        Raises:
            BaseException: what `work` raised.
        """
        self._put(_END, None)
        self._thread.join()
        self._check()

    def _put(self, priority: int, item: T | threading.Event | None) -> None:
        self._queue.put((priority, next(self._numbers), item))

    def _next_priority(self) -> int | None:
        return self._queue.queue[0][0] if self._queue.queue else None

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            while True:
                priority, _, item = self._queue.get()
                if item is None:
                    return
                taken = [item]
                # No other thread takes items, so the first one stays first, or makes room for a more urgent one.
                while priority == _NOW and len(taken) < MOST_ITEMS and self._next_priority() == _NOW:
                    _, _, item = self._queue.get()
                    assert item is not None
                    taken.append(item)
                items = [i for i in taken if not isinstance(i, threading.Event)]
                if items:
                    self._work(items)
                for reached in taken:
                    if isinstance(reached, threading.Event):
                        reached.set()
        except BaseException as error:
            self._fault = error

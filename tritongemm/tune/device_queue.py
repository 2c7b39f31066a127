"""The work queue of the devices, and the queue of all compile jobs of a run."""

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from math import inf
from queue import SimpleQueue
from typing import Generic, TypeVar

from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.tune.task import Task

K = TypeVar("K", bound=Hashable)
W = TypeVar("W")


class DeviceQueue(Generic[K, W]):
    """A queue from which each device draws work in a thread of its own.

    A size is bound to the device that first draws its work, so that all its times are of one device. Work that can
    wait, such as races, is drawn when the device has nothing else to do. Devices start some seconds apart, and by then
    all sizes have work: so for some seconds a device may bind no more sizes than any other, plus one.
    """

    MOST_DRAWN = 256  # pieces of work that a device draws at a time
    EVEN_SECONDS = 20.0  # from the first draw on

    def __init__(self, devices: int = 1) -> None:
        self._changed = threading.Condition()
        self._bound, self._even_until = [0] * devices, inf
        self._urgent: dict[K, deque[W]] = {}
        self._later: dict[K, deque[W]] = {}
        self._device_of: dict[K, int] = {}
        self._closed = False

    def put(self, size: K, work: W, later: bool = False) -> None:
        """Queue a piece of work of a size; one for `later` is drawn when nothing else is left."""
        with self._changed:
            (self._later if later else self._urgent).setdefault(size, deque()).append(work)
            self._changed.notify_all()

    def draw(self, device: int) -> tuple[K, list[W]] | None:
        """Wait for a size and pieces of its work for a device; None once the queue is closed and empty for it."""
        with self._changed:
            self._even_until = min(self._even_until, time.monotonic() + self.EVEN_SECONDS)
            while True:
                left = self._even_until - time.monotonic()
                binds = left <= 0 or self._closed or self._bound[device] == min(self._bound)
                for queue in (self._urgent, self._later):
                    size = next((s for s in queue if self._device_of.get(s, device if binds else -1) == device), None)
                    if size is not None:
                        if size not in self._device_of:
                            self._device_of[size] = device
                            self._bound[device] += 1
                            self._changed.notify_all()
                        return size, self._taken(queue, size)
                if self._closed:
                    return None
                self._changed.wait(left if left > 0 else None)

    def _taken(self, queue: dict[K, deque[W]], size: K) -> list[W]:
        works = queue[size]
        drawn = [works.popleft() for _ in range(min(self.MOST_DRAWN, len(works)))]
        if not works:
            del queue[size]
        return drawn

    def close(self, abandon: bool = False) -> None:
        """Let devices stop once their work is done, or at once if the rest is abandoned."""
        with self._changed:
            self._closed = True
            if abandon:
                self._urgent.clear()
                self._later.clear()
            self._changed.notify_all()


class CompileQueue:
    """A priority queue of compile jobs, in which configs that differ only in launch arguments or sizes share a binary.

    The main thread puts jobs in and takes the waiting configs out; another thread draws the jobs.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[CompileJob | None] = SimpleQueue()  # None: no more come
        self._turns: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Task, Config]]] = {}

    def turn(self, digest: str) -> int:
        """Return the priority of a job in the queue."""
        return self._turns[digest]

    def put(self, task: Task, config: Config, job: CompileJob, turn: int) -> None:
        """Queue the job of a task's config; jobs of lower turns are built first."""
        self._waiting.setdefault(job.digest, []).append((task, config))
        self._turns[job.digest] = min(turn, self._turns.get(job.digest, turn))
        self._jobs.put(job)

    def put_ahead(self, jobs: Iterable[CompileJob], turn: int) -> None:
        """Queue jobs that no config waits for, each once; a later stage finds their binaries in the cache."""
        for job in jobs:
            if job.digest not in self._turns:
                self._turns[job.digest] = turn
                self._jobs.put(job)

    def draw(self) -> Iterator[CompileJob]:
        """Yield the jobs as they come, until the queue is ended."""
        return iter(self._jobs.get, None)

    def end(self) -> None:
        """Let `draw` end after the jobs in the queue."""
        self._jobs.put(None)

    def take(self, digest: str) -> list[tuple[Task, Config]]:
        """Remove and return the configs that waited for a binary."""
        return self._waiting.pop(digest, [])

    def give_up(self) -> list[tuple[Task, Config]]:
        """Remove and return all configs that still wait."""
        left, self._waiting = self._waiting, {}
        return [pair for pairs in left.values() for pair in pairs]

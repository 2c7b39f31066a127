"""The queue of all compile jobs of a run, which maps each binary to the configs that wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue

from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.tuning.task import Task


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

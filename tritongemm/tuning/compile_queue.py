"""The compile jobs of all sizes of a run, and for each binary the configs that wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.tuning.task import Task


class CompileQueue:
    """Jobs on their way to the compilers; configs of several sizes, or that differ in arguments alone, share a binary.

    The thread that runs the line puts jobs in and takes out who waited; another one draws the jobs.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[CompileJob | None] = SimpleQueue()  # None: no more come
        self._turns: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Task, Config]]] = {}

    def turn(self, digest: str) -> int:
        """The turn of a job that has been put in."""
        return self._turns[digest]

    def put(self, task: Task, config: Config, job: CompileJob, turn: int) -> None:
        """Queue the job of a task's config; jobs of lower turns are built first."""
        self._waiting.setdefault(job.digest, []).append((task, config))
        self._turns[job.digest] = min(turn, self._turns.get(job.digest, turn))
        self._jobs.put(job)

    def draw(self) -> Iterator[CompileJob]:
        """The jobs as they come, until there are no more."""
        return iter(self._jobs.get, None)

    def end(self) -> None:
        """Let `draw` end behind the jobs that there are."""
        self._jobs.put(None)

    def take(self, digest: str) -> list[tuple[Task, Config]]:
        """Who waited for a binary that is built; from now on nobody does."""
        return self._waiting.pop(digest, [])

    def give_up(self) -> list[tuple[Task, Config]]:
        """All who still wait; from now on nobody does."""
        left, self._waiting = self._waiting, {}
        return [pair for pairs in left.values() for pair in pairs]

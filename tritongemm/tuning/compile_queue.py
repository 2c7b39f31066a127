"""What sizes want compiled: each binary once, and who waits for it."""

from __future__ import annotations

from collections.abc import Container, Iterator
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
        self._urgent: set[str] = set()
        self._waiting: dict[str, list[tuple[Task, Config]]] = {}

    @property
    def urgent(self) -> Container[str]:
        """Digests of the jobs that are built before others that wait; more come with more jobs."""
        return self._urgent

    def put(self, task: Task, config: Config, job: CompileJob, urgent: bool) -> None:
        """Queue the job of a task's config."""
        self._waiting.setdefault(job.digest, []).append((task, config))
        if urgent:
            self._urgent.add(job.digest)
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

"""Jobs whose compiles take minutes → Built, beside the line, while the search goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from math import inf

from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.tuning.task import Task


class BackgroundBuilds:
    """Compiles on half of a compiler's processes at the most, so that the search has the others.

    Args:
        compiler: builds; must outlive this.
    """

    def __init__(self, compiler: BuildPool) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(max(1, compiler.jobs // 2))
        self._begun: dict[str, Future[Artifact]] = {}

    def put(self, job: CompileJob) -> Future[Artifact]:
        """Begin a job; equal jobs are built once, for the config of their first."""
        if job.digest not in self._begun:
            self._begun[job.digest] = self._pool.submit(self._compiler.build, job)
        return self._begun[job.digest]

    @staticmethod
    def wait(tasks: Iterable[Task], deadline: float) -> None:
        """Wait until one of the tasks can go on, or until `deadline` (of time.monotonic)."""
        slow = [[f for _, f in task.slow] for task in tasks]
        if all(slow):
            seconds = max(0.0, deadline - time.monotonic())
            wait([f for each in slow for f in each], None if seconds == inf else seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Begin no more; what is being compiled ends with the compiler."""
        self._pool.shutdown(wait=False, cancel_futures=True)

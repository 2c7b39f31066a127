"""Jobs whose compiles take minutes → artifacts, in the background, while the search goes on."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from math import inf

from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob


class BackgroundBuilds:
    """Compiles on half of a compiler's processes at the most, so that the search has the others.

    Args:
        compiler: builds; must outlive this.
    """

    def __init__(self, compiler: BuildPool) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(max(1, compiler.jobs // 2))
        self._begun: dict[str, Future[Artifact]] = {}

    def begin(self, job: CompileJob) -> Future[Artifact]:
        """Begin a job; equal jobs are built once, for the config of their first."""
        if job.digest not in self._begun:
            self._begun[job.digest] = self._pool.submit(self._compiler.build, job)
        return self._begun[job.digest]

    @staticmethod
    def wait(groups: Sequence[Collection[Future[Artifact]]], deadline: float) -> None:
        """Wait until a build of one of the groups has ended, or one has none, or until `deadline` (of time.monotonic).

        Args:
            groups: the builds that one task each waits for.
            deadline: when waiting ends at the latest; inf for never.
        """
        if all(groups):
            seconds = max(0.0, deadline - time.monotonic())
            wait([f for group in groups for f in group], None if seconds == inf else seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Begin no more; what is being compiled ends with the compiler."""
        self._pool.shutdown(wait=False, cancel_futures=True)

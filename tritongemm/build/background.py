"""Builds jobs that compile for minutes in the background, while the search goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob


class BackgroundBuilds:
    """A queue of slow builds on at most half of a compiler's processes, so that the search has the others.

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

    def close(self) -> None:
        """Begin no more; running compiles end with the compiler."""
        self._pool.shutdown(wait=False, cancel_futures=True)

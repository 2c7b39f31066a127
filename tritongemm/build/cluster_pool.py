"""Stage: jobs → artifacts, compiled on the hosts of a cluster as well as here; all are kept in the cache of this host.

What a search space has is compiled anywhere, as its job has all that a compiler needs. Kernels of other backends need
headers, files and tools of this host, and are compiled on it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool, BuiltCode, WarmUp
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import OutputError
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import KernelBackend, SearchedBackend
from tritongemm.system.child_process import WorkerDied
from tritongemm.system.ray_hosts import RemoteHost


class RemoteCompiler:
    """A compiler process on another host, whose kernels come into this host's cache."""

    def __init__(self, host: RemoteHost, cache: ArtifactCache) -> None:
        self.host, self.cache = host, cache

    def start(self, opening: object = None) -> None:
        """Start nothing: a request does that."""

    def ask(self, request: Any, timeout: float) -> Iterator[Artifact | OutputError]:
        """Yield the artifact of one job; what is raised is what `WorkerProcess.ask` raises."""
        job, _ = request
        for answer in self.host.ask((job, ""), timeout):
            yield answer.keep(self.cache) if isinstance(answer, BuiltCode) else answer

    def kill(self) -> None:
        """End nothing: the host ends its processes itself."""


class ClusterBuildPool(BuildPool):
    """Compiler processes here and on other hosts, and the cache they fill.

    Arguments are those of `BuildPool`; `jobs` counts processes here.
    """

    def __init__(self, cache: ArtifactCache, jobs: int = 0, timeout: float = 60.0, must_keep: bool = False) -> None:
        super().__init__(cache, jobs, timeout, must_keep)
        self._hosts: list[RemoteHost] = []
        self._free: SimpleQueue[RemoteHost] = SimpleQueue()  # a host once for each of its idle processes

    def add(self, host: RemoteHost, count: int) -> None:
        """Compile with `count` processes of a host too, once its actor is there."""
        self._hosts.append(host)
        self.width += count

        def begin(started: Any) -> None:
            if started.exception() is None:
                for _ in range(count):
                    self._free.put(host)

        host.start().future().add_done_callback(begin)

    def start(self, backends: Sequence[str], target: Target, most: int) -> None:
        """Begin to start the processes, as `BuildPool.start` does, here and there."""
        super().start(backends, target, most)
        for host in self._hosts:
            host.start(WarmUp(tuple(backends), target))

    def _compile(self, job: CompileJob) -> Artifact:
        """Build one job where a process is idle; errors are those of `build`."""
        if isinstance(registry.get(KernelBackend, job.config.backend), SearchedBackend):
            with suppress(Empty, WorkerDied):  # a lost host or crashed compiler: the job is tried again here
                return self._build_away(job)
        return super()._compile(job)

    def _build_away(self, job: CompileJob) -> Artifact:
        """Build one job on another host."""
        host = self._free.get_nowait()
        try:
            return self._ask(RemoteCompiler(host, self.cache), job)
        finally:
            if not host.lost:
                self._free.put(host)

    def close(self) -> None:
        """End all compiler processes, here and on the other hosts."""
        super().close()
        for host in self._hosts:
            host.kill()

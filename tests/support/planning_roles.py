"""What planning processes of a test do: they are killed. They import no tests, which takes longer."""

import os
import signal
from collections.abc import Iterator

from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.tune.search_processes import (
    Answer,
    BegunSearch,
    PreparedBatch,
    RankJob,
    SearchJob,
    SearchWorker,
    TriedBatch,
    WinnerModule,
)


def signature(text: str) -> BegunSearch:
    """A search that shows only what has begun it."""
    return BegunSearch(0, 0, Pruned((), {}, {text: ""}), PreparedBatch([], []))


class WorkerKilledOnce:
    """A process that is killed when it plans the first problem of all."""

    def __call__(self, job: SearchJob) -> Iterator[BegunSearch]:
        assert job.folder is not None
        if not (job.folder / "killed").exists():
            (job.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield signature(job.problem.key)


class WorkerKilledAlways:
    def __call__(self, job: SearchJob) -> Iterator[BegunSearch]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield signature("absent")


class WorkerKilledLater(SearchWorker):
    """A process that is killed when a search has come to its third batch."""

    def __call__(self, request: SearchJob | RankJob | TriedBatch | WinnerModule) -> Iterator[Answer]:
        self.asked = getattr(self, "asked", 0) + isinstance(request, TriedBatch)
        if self.asked == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().__call__(request)

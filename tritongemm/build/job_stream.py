"""Builds jobs while they are still being made, on threads side by side, and yields artifacts as they are built."""

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from math import inf
from operator import length_hint
from queue import PriorityQueue, SimpleQueue

from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact, CompileJob

MOST_BUILDERS = 512  # threads


class JobStream:
    """A queue of jobs for builders, each a thread with one job at a time.

    No build begins after `until`, by time.monotonic; of the jobs that wait the one whose digest has the lowest turn is
    built next.
    """

    def __init__(
        self,
        cache: ArtifactCache,
        build: Callable[[CompileJob], Artifact],
        builders: int,
        until: float,
        turn: Callable[[str], float],
    ) -> None:
        self._cache, self._build, self._builders = cache, build, min(builders, MOST_BUILDERS)
        self._until, self._turn = until, turn
        # A turn, and a number that keeps jobs of one turn in order; the last turn means no more jobs.
        self._waiting: PriorityQueue[tuple[float, int, CompileJob | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._under_way: set[str] = set()  # digests of jobs being built
        self._built: SimpleQueue[Artifact | BaseException | None] = SimpleQueue()  # None: there are no more

    def artifacts(self, jobs: Iterable[CompileJob]) -> Generator[Artifact, None, None]:
        """Yield the artifact of each job as it is built, or found; one for jobs that are equal and under way together.

        Once the generator is closed, or building or making a job has raised an error, which it raises, no build begins.
        """
        self._builders = max(1, min(self._builders, length_hint(jobs, self._builders)))
        threading.Thread(target=self._feed, args=(jobs,), name="compile jobs", daemon=True).start()
        try:
            while (built := self._built.get()) is not None:
                if isinstance(built, BaseException):
                    raise built
                yield built
        finally:
            self._until = -inf

    def _feed(self, jobs: Iterable[CompileJob]) -> None:
        """Pass the jobs to the builders, but for those that are cached or being built, and wait for the last."""
        builders = threading.Thread(target=self._run_builders, name="builders", daemon=True)
        try:
            for job in jobs:
                if job.digest in self._under_way:
                    continue
                cached = self._cache.get(job.digest)
                if cached is not None:
                    self._built.put(replace(cached, config=job.config, seconds=0.0))
                    continue
                self._under_way.add(job.digest)
                self._wait(self._turn(job.digest), job)
                if builders.ident is None:
                    builders.start()
        except BaseException as error:
            self._built.put(error)
        finally:
            for _ in range(self._builders):
                self._wait(inf, None)
            if builders.ident is not None:
                builders.join()
            self._built.put(None)

    def _wait(self, turn: float, job: CompileJob | None) -> None:
        self._waiting.put((turn, next(self._numbers), job))

    def _run_builders(self) -> None:
        import joblib  # slow to import, and not needed where all is cached

        try:
            parallel = joblib.Parallel(n_jobs=self._builders, backend="threading", pre_dispatch="all", batch_size=1)
            parallel(joblib.delayed(self._build_in_turn)() for _ in range(self._builders))
        except BaseException as error:
            self._built.put(error)

    def _build_in_turn(self) -> None:
        """Build one job after another, until there are no more."""
        while (job := self._waiting.get()[-1]) is not None:
            built: Artifact | BaseException | None = None
            try:
                if time.monotonic() <= self._until:
                    built = self._build(job)
            except BaseException as error:
                built = error
            # Before it is reported: a later request finds it in the cache, or has it built again.
            self._under_way.discard(job.digest)
            if built is not None:
                self._built.put(built)

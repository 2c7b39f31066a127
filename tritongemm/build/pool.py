"""Stage: compile jobs → artifacts, in parallel, with no GPU touched.

joblib's threads each drive one compiler process. A compile that crashes or outlasts its limit takes its process with it
and costs that config alone; one that crashed gets a second chance, as memory may have been short. Artifacts are in a
content-addressed cache: what a binary depends on is hashed into its folder's name, so a second run of the same space,
of another size or on a GPU node, compiles nothing.
"""

import gc
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from operator import length_hint
from pathlib import Path
from queue import PriorityQueue, SimpleQueue

from tritongemm.build.cache import ArtifactCache
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import OutputError, ToolKilledError
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, KernelBackend
from tritongemm.system.child_process import ServingProcess, WorkerDied, WorkerError, WorkerProcess, WorkerTimeout
from tritongemm.system.temporary_folder import MEMORY, TemporaryFolder, sweep

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
        self._known: dict[str, Artifact] = {}  # what was built or found, so that no file is read and verified twice
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
                cached = self._known.get(job.digest) or self._cache.get(job.digest)
                if cached is not None:
                    self._known[job.digest] = cached
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
                    if built.status == "ok":
                        self._known[job.digest] = built
            except BaseException as error:
                built = error
            # Before it is reported: a later request finds it, or has it built again.
            self._under_way.discard(job.digest)
            if built is not None:
                self._built.put(built)


GIVES_WAY = 5  # niceness of compilers: planning, searching and timing go first, as compilers wait for them
_ROOM = 64 << 20  # bytes a compiler may need for its files; nvcc keeps a few stages of a large source


def _memory(room: int) -> str | None:
    """Return a folder in memory with enough free bytes, or None; a container's has 64 MB by default."""
    return MEMORY if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= room else None


@dataclass(frozen=True)
class WarmUp:
    """A request to a compiler process to load what the compilers of these backends need for a target."""

    backends: tuple[str, ...]
    target: Target


@dataclass(frozen=True)
class BuiltCode:
    """A compiled kernel that is in no cache yet; its code is empty where compiling failed, and `name` is its file's."""

    built: Artifact
    code: bytes
    name: str

    def keep(self, cache: ArtifactCache) -> Artifact | OutputError:
        """Return the artifact, kept in a cache, or why it can't be."""
        try:
            return cache.put(self.built, self.code, self.name)
        except OutputError as error:
            return error


class CompilerWorker:
    """What a compiler process does: build one job and put it into the cache."""

    COLLECTED = 32  # builds between two collections of garbage, which left to itself takes a tenth of the time

    def __init__(self) -> None:
        self._builds = 0
        os.nice(GIVES_WAY)
        gc.disable()

    def __call__(self, request: WarmUp | tuple[CompileJob, str]) -> Iterator[Artifact | OutputError | BuiltCode]:
        """Build a job and keep it in a cache's folder, or return it where no folder is named, or warm up."""
        if isinstance(request, WarmUp):
            self._warm_up(request)
            return
        self._builds += 1
        if self._builds % self.COLLECTED == 0:
            gc.collect()
            gc.freeze()  # objects alive by now stay
        job, folder = request
        backend = registry.get(KernelBackend, job.config.backend)
        started = time.perf_counter()
        try:
            built, code, name = backend.compile(job)
        except (OSError, MemoryError, ToolKilledError) as error:  # not the config's fault
            reason = f"{type(error).__name__}: {error}"
            yield Artifact(job.config, job.digest, status="compile_failed", reason=reason, try_again=True)
            return
        if built.try_again:
            yield built
            return
        one = BuiltCode(replace(built, seconds=time.perf_counter() - started), code, name)
        yield one.keep(ArtifactCache(Path(folder))) if folder else one

    @staticmethod
    def _warm_up(request: WarmUp) -> None:
        for name in request.backends:
            backend = registry.get(Backend, name)
            if isinstance(backend, KernelBackend):
                backend.warm_up(request.target)


class BuildPool:
    """Compiler processes and the cache they fill.

    `jobs` are processes at a time; 0 for one for each core that this process may use. A compile may take `timeout`
    seconds, or a backend's `compile_limit_s` where that is more. With `must_keep` a cache that can't be written is an
    error.
    """

    ROLE = "tritongemm.build.pool:CompilerWorker"

    def __init__(self, cache: ArtifactCache, jobs: int = 0, timeout: float = 60.0, must_keep: bool = False) -> None:
        self.cache, self.timeout, self.must_keep = cache, timeout, must_keep
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self.width = self.jobs
        self._turns = threading.Semaphore(self.jobs)
        self._children: list[WorkerProcess] = []
        # The last one used goes first: a process that has compiled is quicker than one that has not.
        self._idle: list[WorkerProcess] = []
        self._again = threading.Lock()  # second chances are given one at a time
        self._closed = False
        # Compilers write and remove a dozen small files for each config; in memory they take a tenth less time.
        sweep()
        cache.sweep()
        self._temporary = TemporaryFolder(_memory(self.jobs * _ROOM))

    def start(self, backends: Sequence[str], target: Target, most: int) -> None:
        """Start up to `most` processes where the cache is empty, ready for the first jobs; others start on demand."""
        if any(self.cache.folder.glob("*/*")):
            return
        children = [self._take_child() for _ in range(min(self.jobs, most))]
        self._idle += children
        for child in children:
            child.start(WarmUp(tuple(backends), target))

    def _take_child(self) -> WorkerProcess:
        """Return an idle process."""
        try:
            return self._idle.pop()
        except IndexError:
            child = WorkerProcess(self.ROLE, {"TMPDIR": str(self._temporary.path)})
            self._children.append(child)
            return child

    @contextmanager
    def _lent_child(self) -> Iterator[WorkerProcess]:
        """Lend an idle process for one job; wait while there is none."""
        with self._turns:
            child = self._take_child()
            try:
                yield child
            finally:
                self._idle.append(child)

    def build(self, job: CompileJob) -> Artifact:
        """Return one job's artifact, from the cache or compiled in a child; a failure of the job is a value."""
        cached = self.cache.get(job.digest)
        if cached is not None:
            return replace(cached, config=job.config, seconds=0.0)
        return self._compile(job)

    def _compile(self, job: CompileJob) -> Artifact:
        """Return one job's artifact, compiled in a child; errors are those of `build`."""
        with self._lent_child() as child:
            try:
                return self._ask(child, job)
            except WorkerDied:
                pass  # memory may have been short
            with self._again:
                try:
                    return self._ask(child, job)
                except WorkerDied as death:
                    failed = Artifact(job.config, job.digest, status="compile_failed")
                    reason = f"the compiler process died: {death}"
                    return replace(failed, reason=reason, try_again=death.from_outside)

    def _ask(self, child: ServingProcess, job: CompileJob) -> Artifact:
        """Return what a child builds for one job."""
        if self._closed:
            raise WorkerDied("stopped", from_outside=True)
        failed = Artifact(job.config, job.digest, status="compile_failed")
        limit = max(self.timeout, registry.get(KernelBackend, job.config.backend).compile_limit_s)
        try:
            answer: Artifact | OutputError
            (answer,) = child.ask((job, str(self.cache.folder)), limit)
            if isinstance(answer, OutputError):
                if self.must_keep:
                    raise answer
                return replace(failed, reason=str(answer), try_again=True)
            return replace(answer, config=job.config)
        except WorkerTimeout:  # the machine may have been busy
            return replace(failed, status="timeout", reason=f"compile took more than {limit:g} s", try_again=True)
        except WorkerError as error:
            return replace(failed, reason=str(error))

    def stream(
        self, jobs: Iterable[CompileJob], until: float = inf, turn: Callable[[str], float] = lambda digest: 0.0
    ) -> Generator[Artifact, None, None]:
        """Yield artifacts as they are built, while `jobs` are still being made; cached ones come at once.

        Equal jobs under way are built once, and yielded once, with the config of the first. No compile begins after
        `until`, by time.monotonic; of the jobs that wait the one whose digest has the lowest turn is built next.
        """
        return JobStream(self.cache, self.build, self.width, until, turn).artifacts(jobs)

    def close(self) -> None:
        """End all compiler processes; threads that wait for one get an error."""
        self._closed = True
        for child in self._children:
            child.kill()
        self._temporary.close()


def build_missing(jobs: Iterable[CompileJob], cache: ArtifactCache) -> dict[str, Artifact]:
    """Return the artifacts of jobs by their digests, compiled on all cores where the cache lacks them."""
    wanted = {job.digest: job for job in jobs}
    found = {digest: artifact for digest in wanted if (artifact := cache.get(digest)) is not None}
    if missing := [job for digest, job in wanted.items() if digest not in found]:
        pool = BuildPool(cache, min(len(os.sched_getaffinity(0)), len(missing)))
        try:
            found |= {artifact.digest: artifact for artifact in pool.stream(missing)}
        finally:
            pool.close()
    return found


class BackgroundBuilds:
    """A queue of slow builds on at most half of a compiler's processes, so that the search has the others."""

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

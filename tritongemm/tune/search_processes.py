"""Plans problems, runs their searches and writes winners' modules in child processes, off the main process.

Planning takes a quarter to half of a core-second where a space has 40 million configs, half of it to prune them; a
search takes a tenth, and a module too. All threads of a run share one core, which must keep several devices busy. A
search whose process is lost is restarted in the main process, and sent the same trials.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from threading import Condition
from typing import Any, TypeAlias

from tritongemm.build.prepare import compile_job
from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.space import SearchLimits
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Search, SearchedBackend, SearchPlan, Strategy
from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.search.planner import NO_LIMITS, PlannedProblem, expected_best, plan_search
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

# Up to this number of problems planning is faster than starting processes.
FEW_PROBLEMS = 3
# Each takes 100 to 130 MB for the run, and two to three core-seconds before its first plan. So there is one for
# two compilers, which begin with the first sizes while others are planned, up to this number.
MOST_PROCESSES = 32


@dataclass(frozen=True)
class SearchJob:
    """A problem to plan and to search."""

    # problem, target, folder, backend, limits: the arguments of `plan_search`; the folder absolute, as the process that
    # plans may have started in another
    problem: Problem
    target: Target
    folder: Path | None
    backend: str
    limits: SearchLimits = NO_LIMITS
    strategy: str = "guided"  # plug-in of strategies/
    # budget, population, problems_per_core, seeds: as of `Strategy.search` and its `SearchPlan`; seeds in addition to
    # the limits', which come first
    budget: int = 0
    population: int = 0
    problems_per_core: float = 0.0
    seeds: tuple[Config, ...] = ()

    def plan(self) -> PlannedProblem:
        """Plan the problem in this process."""
        return plan_search(self.problem, self.target, self.folder, self.backend, self.limits)

    def most_configs(self, kept: int) -> int:
        """Return how many of the kept configs the search tries at most."""
        return registry.get(Strategy, self.strategy).most_configs(kept, self.budget, self.population)

    def planned_here(self, planned: PlannedProblem) -> PlannedSearch:
        """Return the planned search of the problem, which will run in this process."""
        kept = len(planned.pruned.kept)
        begin = partial(self.search, planned)
        return PlannedSearch(len(planned.space), kept, self.most_configs(kept), planned.pruned, begin)

    def search(self, planned: PlannedProblem, compiled: Collection[str], built: Collection[str]) -> Search:
        """Return the search of the problem, in this process; `compiled` and `built` as in `SearchPlan`."""
        if not planned.order.configs:
            return no_search()  # no template computes it; other backends may
        seeds = (*self.limits.first, *self.seeds)
        plan = SearchPlan(planned.space, planned.order, seeds, compiled, built, self.population, self.problems_per_core)
        return registry.get(Strategy, self.strategy).search(plan, self.budget)


@dataclass(frozen=True)
class RankJob:
    """A problem whose fastest kernels by the model are asked for; the fields are the arguments of `expected_best`."""

    problem: Problem
    target: Target
    backend: str
    limits: SearchLimits

    def best(self) -> list[Config]:
        """Rank the problem's space in this process."""
        return expected_best(self.problem, self.target, self.backend, self.limits)


@dataclass(frozen=True)
class PreparedBatch:
    """A search's batch with the compile job of each config, or the reason why it can't be compiled."""

    configs: list[Config]
    jobs: list[CompileJob | Support]

    @classmethod
    def of(cls, configs: list[Config], problem: Problem, target: Target) -> PreparedBatch:
        """Prepare a batch of configs for a problem, with the digests of their jobs computed."""
        jobs = [compile_job(problem, config, target) for config in configs]
        for job in jobs:
            if isinstance(job, CompileJob):
                _ = job.digest  # it is cached in the job
        return cls(configs, jobs)


@dataclass(frozen=True)
class BegunSearch:
    """A search that a child process has begun."""

    # total, kept: configs before and after pruning
    total: int
    kept: int
    pruned: Pruned  # what each rule removed, without the kept configs
    first: PreparedBatch  # the first batch


@dataclass(frozen=True)
class TriedBatch:
    """The trials of the last batch of a problem's search, and the names of the kernels compiled by now."""

    problem: Problem
    trials: list[Trial]
    built: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlannedSearch:
    """The search of a problem that has been planned."""

    # total, kept: configs before and after pruning
    total: int
    kept: int
    most: int  # how many of these the search tries at most
    pruned: Pruned  # what each rule removed; it may lack the kept configs
    # Starts the search, here or in another process, given `compiled` and `built` of its `SearchPlan`.
    begin: Callable[[Collection[str], Collection[str]], Search]
    # Compile jobs of a batch's configs that another process has prepared, by config name.
    jobs: dict[str, CompileJob | Support] = field(default_factory=dict)


@dataclass(frozen=True)
class WinnerModule:
    """The fastest generated kernel of a race, to be written as a standalone module."""

    backend: str
    record: Record
    target: Target
    folder: Path

    def write(self) -> None:
        """Write the module in this process."""
        backend = registry.get(Backend, self.backend)
        assert isinstance(backend, SearchedBackend)
        backend.write_winner(self.record, self.target, self.folder)


Answer: TypeAlias = BegunSearch | PlannedProblem | PreparedBatch | list[Config] | None


class SearchWorker:
    """The request handler of a planning process."""

    COLLECTED = 100_000  # objects between two collections of garbage, which take 8 % of the time at Python's 700

    def __init__(self) -> None:
        gc.set_threshold(self.COLLECTED)
        self._searches: dict[Problem, tuple[Search, Target, set[str]]] = {}

    def __call__(self, request: SearchJob | RankJob | TriedBatch | WinnerModule) -> Iterator[Answer]:
        """Yield one answer: the first batch of a search, or the plan where it is searched elsewhere; then the next.

        The last answer of a search is None, and so is that of a module.
        """
        if isinstance(request, WinnerModule):
            request.write()
            yield None
            return
        if isinstance(request, TriedBatch):
            yield self._go_on(request)
            return
        if isinstance(request, RankJob):
            yield request.best()
            return
        planned = request.plan()
        if not registry.get(Strategy, request.strategy).independent:
            yield planned
            return
        built: set[str] = set()
        search = request.search(planned, (), built)
        self._searches[request.problem] = search, request.target, built
        first = PreparedBatch.of(next(search), request.problem, request.target)
        pruned = replace(planned.pruned, kept=())
        yield BegunSearch(len(planned.space), len(planned.pruned.kept), pruned, first)

    def _go_on(self, tried: TriedBatch) -> PreparedBatch | None:
        search, target, built = self._searches[tried.problem]
        built.update(tried.built)
        try:
            return PreparedBatch.of(search.send(tried.trials), tried.problem, target)
        except StopIteration:
            del self._searches[tried.problem]
            return None


class SearchProcess:
    """A child process that plans problems and runs their searches, one request at a time.

    A request for the next batch of a search is answered before another problem is planned.
    """

    ROLE = "tritongemm.tune.search_processes:SearchWorker"
    TRIES = 2  # tries before doing without it: a process may be killed for want of memory

    def __init__(self) -> None:
        self._child = WorkerProcess(self.ROLE)
        self._changed = Condition()
        self._is_taken, self._waiting_for_batch = False, 0
        self.closed = False

    @contextmanager
    def _turn(self, for_batch: bool) -> Iterator[None]:
        with self._changed:
            self._waiting_for_batch += for_batch
            self._changed.wait_for(lambda: not self._is_taken and (for_batch or not self._waiting_for_batch))
            self._waiting_for_batch -= for_batch
            self._is_taken = True
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def begin(self, job: SearchJob) -> BegunSearch | PlannedProblem | None:
        """Plan a job in the process and start its search; None if the process is killed repeatedly, or fails."""
        answer: BegunSearch | PlannedProblem | None = self._ask(job)
        return answer

    def best(self, job: RankJob) -> list[Config] | None:
        """Rank a job's space in the process; None if the process is killed repeatedly, or fails."""
        answer: list[Config] | None = self._ask(job)
        return answer

    def _ask(self, job: SearchJob | RankJob) -> Any:
        # The caller meets the same error when it plans by itself, and can report it in full.
        with self._turn(for_batch=False), suppress(UnavailableError, WorkerError, WorkerTimeout):
            for _ in range(self.TRIES):
                if self.closed:
                    raise CancelledError
                with suppress(WorkerDied):
                    (answer,) = self._child.ask(job, inf)
                    return answer
        return None

    def search(
        self,
        job: SearchJob,
        begun: BegunSearch,
        jobs: dict[str, CompileJob | Support],
        compiled: Collection[str],
        built: Collection[str],
    ) -> Search:
        """Return a search that the process has begun; if the process is lost or fails, this process continues it."""
        reported: list[list[Trial]] = []
        batch: PreparedBatch | None = begun.first
        while batch is not None:
            jobs.update((config.name, made) for config, made in zip(batch.configs, batch.jobs, strict=True))
            reported.append((yield batch.configs))
            try:
                with self._turn(for_batch=True):
                    if self.closed:
                        return
                    (batch,) = self._child.ask(TriedBatch(job.problem, reported[-1], frozenset(built)), inf)
            except (UnavailableError, WorkerDied, WorkerError, WorkerTimeout):
                if not self.closed:
                    yield from _resumed(job.search(job.plan(), compiled, built), reported)
                return

    def write(self, module: WinnerModule) -> None:
        """Write a module in the process; if the process is lost or fails, this process writes it."""
        try:
            with self._turn(for_batch=True):
                list(self._child.ask(module, inf))  # the answer comes when it is taken
        except (UnavailableError, WorkerDied, WorkerError, WorkerTimeout):
            module.write()

    def close(self) -> None:
        """End the process; unanswered requests are given up."""
        self.closed = True
        self._child.kill()


class Planner:
    """Plans the problems of a run, and searches them if it has processes (else not); these end with it."""

    def __init__(self, count: int) -> None:
        self._processes = [SearchProcess() for _ in range(count)]
        self._threads = ThreadPoolExecutor(max(1, count))
        self._writers, self._next = ThreadPoolExecutor(max(1, count)), itertools.cycle(self._processes)
        self._modules = list[Future[None]]()

    @classmethod
    def for_problems(cls, problems: int, jobs: int) -> Planner:
        """Return a planner for a number of problems, with a process for each two of the `jobs` that compile."""
        return cls(0 if problems <= FEW_PROBLEMS or jobs == 1 else min(cdiv(jobs, 2), problems, MOST_PROCESSES))

    @property
    def width(self) -> int:
        """Number of searches that can compute their next batch at a time."""
        return max(1, len(self._processes))

    def plan(self, jobs: Sequence[SearchJob]) -> Generator[PlannedSearch, None, None]:
        """Yield the planned searches of these jobs in order; this process plans those that the children can't."""
        if not self._processes:
            yield from (job.planned_here(job.plan()) for job in jobs)
            return
        dealt = list(zip(jobs, itertools.cycle(self._processes)))
        answers = self._threads.map(lambda pair: pair[1].begin(pair[0]), dealt)
        for (job, process), answer in zip(dealt, answers, strict=True):
            if isinstance(answer, BegunSearch):
                made = dict[str, CompileJob | Support]()
                begin = partial(process.search, job, answer, made)
                most = job.most_configs(answer.kept)
                yield PlannedSearch(answer.total, answer.kept, most, answer.pruned, begin, made)
            else:
                yield job.planned_here(answer or job.plan())

    def best(self, jobs: Sequence[RankJob]) -> Iterator[list[Config]]:
        """Yield the kernels of these jobs in order; this process ranks those that the children can't."""
        if not self._processes:
            yield from (job.best() for job in jobs)
            return
        dealt = list(zip(jobs, itertools.cycle(self._processes)))
        answers = self._threads.map(lambda pair: pair[1].best(pair[0]), dealt)
        for job, answer in zip(jobs, answers, strict=True):
            yield job.best() if answer is None else answer

    def write(self, module: WinnerModule | None) -> None:
        """Have a winner's module, if there is one, written by one of the processes."""
        if module is None:
            return
        write = next(self._next).write if self._processes else WinnerModule.write
        self._modules.append(self._writers.submit(write, module))

    def finish_modules(self) -> None:
        """Wait until all modules are written."""
        while self._modules:
            self._modules.pop().result()

    def close(self) -> None:
        """End the processes; unfinished plans, searches and modules are given up."""
        for process in self._processes:
            process.close()
        for threads in (self._threads, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)


def no_search() -> Search:
    """Return the search for problems without generated kernels, which yields one empty batch."""
    yield []


def _resumed(search: Search, reported: Sequence[list[Trial]]) -> Search:
    """Yield the later batches of a new search, brought to where a lost one was by sending it the same trials."""
    next(search)
    try:
        for trials in reported:
            batch = search.send(trials)
        while True:
            batch = search.send((yield batch))
    except StopIteration:
        return

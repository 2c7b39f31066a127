"""Stage: Problem, Target → what to try: the space pruned, ranked and written out as a module. Uses no GPU.

It takes a core a third of a second where thousands of configs are kept, most of it to rank them and to write the
module, so many problems are planned side by side in child processes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from queue import SimpleQueue

from tritongemm.codegen import template_facts
from tritongemm.core.errors import UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.search_results import Predictions, Pruned
from tritongemm.core.space import Space
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

# So many problems, or fewer, are planned sooner than processes start.
FEW_PROBLEMS = 3
NO_LIMITS = SearchLimits()


@dataclass(frozen=True)
class PlannedProblem:
    """What to try for one problem.

    Attributes:
        problem: what is tuned.
        space: before pruning.
        order: kept configs with their predictions, the best first.
        pruned: what each rule removed, with the kept configs.
        module: path of the generated module with all of them.
    """

    problem: Problem
    space: Space
    order: Predictions
    pruned: Pruned
    module: Path


def plan_search(
    problem: Problem, target: Target, folder: Path, backend: str, limits: SearchLimits = NO_LIMITS
) -> PlannedProblem:
    """Plan one problem.

    Args:
        problem: what is tuned.
        target: where.
        folder: where the module goes.
        backend: name of the backend that is searched, a `SearchedBackend`.
        limits: what of its space may be tried.
    """
    searched = registry.get(SearchedBackend, backend)
    space = limits.narrow(searched.space(problem, target))
    if not limits.templates:
        space = replace(space, axes=tuple(a for a in space.axes if not template_facts.search_facts(a.template).asked))
    pruned = prune.prune(space, problem, target)
    order = cost_model.rank(tuple(dict.fromkeys((*pruned.kept, *limits.first))), problem, target)
    module = searched.write_candidates(problem, order.configs, target, folder)
    return PlannedProblem(problem, space, order, pruned, module)


@dataclass(frozen=True)
class PlanJob:
    """A problem to plan in a child process; the attributes are `plan_search`'s arguments."""

    problem: Problem
    target: Target
    folder: Path
    backend: str
    limits: SearchLimits = NO_LIMITS

    def plan(self) -> PlannedProblem:
        """Plan it in this process."""
        return plan_search(self.problem, self.target, self.folder, self.backend, self.limits)


class PlanWorker:
    """What a planning process does."""

    def __call__(self, job: PlanJob) -> Iterator[PlannedProblem]:
        """One answer: the problem, planned."""
        yield job.plan()


class PlanningProcesses:
    """Processes that plan problems.

    Args:
        count: processes.
    """

    ROLE = "tritongemm.search.planner:PlanWorker"
    TRIES = 2  # A process may be killed for want of memory; who does without it is slower, but gets there.

    def __init__(self, count: int) -> None:
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        self._children = [WorkerProcess(self.ROLE) for _ in range(count)]
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(count)
        self._closed = False

    def plan(self, jobs: Sequence[PlanJob]) -> Iterator[PlannedProblem]:
        """The problems of these jobs, planned, in their order; where the processes can't, this one plans them.

        Raises:
            OutputError: a module can't be written.
        """
        for job, planned in zip(jobs, self._threads.map(self._ask, jobs), strict=True):
            yield planned or job.plan()

    def _ask(self, job: PlanJob) -> PlannedProblem | None:
        """What a process makes of a job; None where it is killed again and again, or meets an error."""
        child = self._idle.get()
        try:
            for _ in range(self.TRIES):
                if self._closed:
                    break
                with suppress(WorkerDied):
                    planned: PlannedProblem
                    (planned,) = child.ask(job, inf)
                    return planned
        except (UnavailableError, WorkerError, WorkerTimeout):
            pass  # who asked meets the same error when it plans by itself, and can tell it whole
        finally:
            self._idle.put(child)
        return None

    def close(self) -> None:
        """End the processes; what has not been planned is given up."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()


def plan_searches(
    problems: Sequence[Problem],
    target: Target,
    folder: Path,
    backend: str,
    jobs: int,
    limits: SearchLimits = NO_LIMITS,
) -> Generator[PlannedProblem, None, None]:
    """Plan problems, in their order, on `jobs` processes, which end with it; other arguments are `plan_search`'s."""
    wanted = [PlanJob(problem, target, folder, backend, limits) for problem in problems]
    if len(wanted) <= FEW_PROBLEMS or jobs == 1:
        yield from (job.plan() for job in wanted)
        return
    processes = PlanningProcesses(min(jobs, len(wanted)))
    try:
        yield from processes.plan(wanted)
    finally:
        processes.close()

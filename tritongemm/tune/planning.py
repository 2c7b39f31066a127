"""The planning stage, which prunes and ranks the space of each task in order, and starts its strategy."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TypeAlias

from tritongemm.build.prepare import compile_job
from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.plugins.contracts import Watcher
from tritongemm.search.warm_start import WarmStart
from tritongemm.tune import roster
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.search_processes import PlannedSearch, Planner, SearchJob, no_search
from tritongemm.tune.task import Task

# Tasks with their plans; None where no backend is searched.
PlannedTasks: TypeAlias = Generator[tuple[Task, PlannedSearch | None], None, None]


def plan_tasks(
    tasks: Sequence[Task], target: Target, options: TuningOptions, planner: Planner, warm_start: WarmStart, cores: float
) -> PlannedTasks:
    """Yield the tasks in order with their plans, each as soon as it is planned; None if no backend is searched.

    `cores` of a GPU compile.
    """
    each = len(tasks) / cores
    searched = next(filter(roster.is_searched, options.backends), None)
    if searched is None:
        yield from ((task, None) for task in tasks)
        return
    jobs = [search_job(t.problem, target, searched, options, warm_start, each) for t in tasks]
    with closing(planner.plan(jobs)) as plans:
        yield from zip(tasks, plans, strict=True)


def search_job(
    problem: Problem,
    target: Target,
    backend: str,
    options: TuningOptions,
    warm_start: WarmStart,
    problems_per_core: float,
) -> SearchJob:
    """Return the planning and search job of a problem, for one backend's kernels."""
    return SearchJob(
        problem,
        target,
        options.folder.absolute() if options.stop else None,
        backend,
        options.limits_of(problem),
        options.strategy,
        options.budgets.get(problem, options.budget),
        options.population,
        problems_per_core,
        tuple(warm_start.winners(problem, backend)),
    )


def begin_search(task: Task, planned: PlannedSearch | None, warm_start: WarmStart, watcher: Watcher) -> None:
    """Start a task's strategy and store its first batch in the task."""
    if planned is None:
        task.search = no_search()
    else:
        watcher.planned(task.problem, planned.total, planned.kept, planned.pruned)
        known = warm_start.compiled_kernels(task.problem), warm_start.built_kernels(task.problem)
        task.search, task.jobs, task.untried = planned.begin(*known), planned.jobs, planned.most
        watcher.stage("search", planned.most)
    task.batch = next(task.search)
    warm_start.note_batch(task.problem, task.batch)
    watcher.step("plan")


def take_job(task: Task, config: Config, target: Target) -> CompileJob | Support:
    """Return the compile job of a task's config, or why it can't be compiled.

    A job that a planning process has prepared is used and then dropped.
    """
    made = task.jobs.pop(config.name, None)
    return compile_job(task.problem, config, target) if made is None else made

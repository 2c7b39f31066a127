"""Stage: tasks → their plans, in the order of the tasks, and what their strategies try first."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tritongemm.core.target import Target
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Search, SearchPlan, Strategy, Watcher
from tritongemm.search.planner import PlannedProblem, plan_searches
from tritongemm.search.warm_start import WarmStart
from tritongemm.tuning import roster
from tritongemm.tuning.task import Task, no_search


def plan_tasks(
    tasks: Sequence[Task], target: Target, options: TuningOptions, processes: int
) -> Generator[tuple[Task, PlannedProblem | None], None, None]:
    """The tasks in their order, each as soon as it is planned; None where no backend is searched.

    Args:
        tasks: those to plan.
        target: where they are tuned.
        options: backends, limits and folder.
        processes: to plan on.
    """
    searched = _searched(options)
    if searched is None:
        yield from ((task, None) for task in tasks)
        return
    problems = [task.problem for task in tasks]
    planned = plan_searches(problems, target, options.folder, searched, processes, options.limits)
    try:
        yield from zip(tasks, planned, strict=True)
    finally:
        planned.close()


def begin_search(
    task: Task, planned: PlannedProblem | None, options: TuningOptions, warm_start: WarmStart, watcher: Watcher
) -> None:
    """Have a task's strategy say what to try first.

    Args:
        task: is given its search and its first batch; tasks must come in the order of the run.
        planned: its plan; None where no backend is searched.
        options: strategy and budget.
        warm_start: what problems tell each other's strategies.
        watcher: told of the progress.
    """
    task.search = no_search() if planned is None else _search(planned, options, warm_start, watcher)
    task.batch = next(task.search)
    warm_start.note_batch(task.problem, task.batch)
    watcher.step("plan")


def _searched(options: TuningOptions) -> str | None:
    """The backend whose space is searched, if one takes part."""
    return next(filter(roster.is_searched, options.backends), None)


def _search(planned: PlannedProblem, options: TuningOptions, warm_start: WarmStart, watcher: Watcher) -> Search:
    problem, backend = planned.problem, _searched(options)
    watcher.planned(problem, len(planned.space), planned.pruned)
    if not planned.order.configs or backend is None:
        return no_search()  # no template computes it; other backends may
    plan = SearchPlan(
        planned.space,
        planned.order,
        (*options.limits.first, *warm_start.winners(problem, backend)),
        warm_start.compiled_kernels(problem),
        options.population,
    )
    return registry.get(Strategy, options.strategy).search(plan, options.budgets.get(problem, options.budget))

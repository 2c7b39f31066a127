"""Stage: the tasks of a round → their batches, planned in the order of the tasks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing

from tritongemm.core.target import Target
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Search, SearchPlan, Strategy, Watcher
from tritongemm.search.planner import PlannedProblem, plan_searches
from tritongemm.search.warm_start import WarmStart
from tritongemm.tuning import roster
from tritongemm.tuning.task import Task, no_search


def plan_tasks(
    tasks: Sequence[Task],
    target: Target,
    options: TuningOptions,
    processes: int,
    warm_start: WarmStart,
    watcher: Watcher,
) -> Generator[Task, None, None]:
    """The tasks in their order, each as soon as its strategy has said what to try first.

    Args:
        tasks: those that have been planned already are given back as they are.
        target: where they are tuned.
        options: strategy, budget and folder.
        processes: to plan on.
        warm_start: what problems tell each other's strategies.
        watcher: told of the progress.
    """
    problems = [t.problem for t in tasks if t.search is None]
    searched = next(filter(roster.is_searched, options.backends), None)
    planned: Iterator[PlannedProblem] = iter(())
    with ExitStack() as stack:
        if problems and searched is not None:
            planning = plan_searches(problems, target, options.folder, searched, processes, options.limits)
            planned = stack.enter_context(closing(planning))
        for task in tasks:
            if task.search is None:
                task.search = (
                    no_search()
                    if searched is None
                    else _begin_search(task, next(planned), options, warm_start, watcher, searched)
                )
                task.batch = next(task.search)
                warm_start.note_batch(task.problem, task.batch)
                watcher.step("plan")
            yield task


def _begin_search(
    task: Task, planned: PlannedProblem, options: TuningOptions, warm_start: WarmStart, watcher: Watcher, backend: str
) -> Search:
    watcher.planned(task.problem, len(planned.space), planned.pruned)
    if not planned.order.configs:
        return no_search()  # no template computes it; other backends may
    plan = SearchPlan(
        planned.space,
        planned.order,
        (*options.limits.first, *warm_start.winners(task.problem, backend)),
        warm_start.compiled_kernels(task.problem),
        options.population,
    )
    return registry.get(Strategy, options.strategy).search(plan, options.budgets.get(task.problem, options.budget))

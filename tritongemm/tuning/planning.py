"""Stage: tasks of a run → their searches, begun in the order of the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins import _modules as registry
from tritongemm.plugins.contracts import Search, Watcher
from tritongemm.search.planner import SearchPlan, plan_searches
from tritongemm.search.warm_start import WarmStart
from tritongemm.tuning import roster
from tritongemm.tuning.task import Task, no_search


def planned(
    tasks: Sequence[Task], what: TuningOptions, jobs: int, others: WarmStart, watcher: Watcher
) -> Iterator[Task]:
    """The tasks in their order, each as soon as its strategy has said what to try first.

    Args:
        tasks: those that have been planned already are given back as they are.
        what: names strategy, budget and folder.
        jobs: processes to plan on.
        others: what they tell each other's strategies.
        watcher: told of the progress.
    """
    problems = [t.problem for t in tasks if t.search is None]
    searched = any(map(roster.is_searched, what.backends))
    made = plan_searches(problems, tasks[0].judge.target, what.folder, jobs) if problems and searched else iter(())
    for task in tasks:
        if task.search is None:
            task.search = _search(task, next(made), what, others, watcher) if searched else no_search()
            task.batch = next(task.search)
            others.asked(task.problem, task.batch)
            watcher.step("plan")
        yield task


def _search(task: Task, made: SearchPlan, what: TuningOptions, others: WarmStart, watcher: Watcher) -> Search:
    task.module = made.module
    watcher.planned(task.problem, len(made.space), made.pruned)
    known = others.winners(task.problem), made.order, others.kernels(task.problem)
    search: Search = registry.load("strategies", what.strategy).search(
        made.space, made.order.configs, what.budget, *known
    )
    return search

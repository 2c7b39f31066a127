"""Stage: tasks of a run → their searches, begun in the order of the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Search, SearchPlan, Strategy, Watcher
from tritongemm.search.planner import PlannedProblem, plan_searches
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
    backend = next(filter(roster.is_searched, what.backends), "")
    plans: Iterator[PlannedProblem] = iter(())
    if problems and backend:
        plans = plan_searches(problems, tasks[0].judge.target, what.folder, backend, jobs)
    for task in tasks:
        if task.search is None:
            task.search = _begin_search(task, next(plans), backend, what, others, watcher) if backend else no_search()
            task.batch = next(task.search)
            others.note_batch(task.problem, task.batch)
            watcher.step("plan")
        yield task


def _begin_search(
    task: Task, problem_plan: PlannedProblem, backend: str, what: TuningOptions, others: WarmStart, watcher: Watcher
) -> Search:
    task.module = problem_plan.module
    watcher.planned(task.problem, len(problem_plan.space), problem_plan.pruned)
    plan = SearchPlan(
        space=problem_plan.space,
        expected=problem_plan.order,
        seeds=tuple(others.winners(task.problem, backend)),
        compiled=others.compiled_kernels(task.problem),
    )
    strategy: Strategy = registry.get(Strategy, what.strategy)
    return strategy.search(plan, what.budget)

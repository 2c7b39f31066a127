"""Stage: Problem, Target → what to try: the space pruned, ranked and written out as a module. Uses no GPU.

It takes a core a third of a second where thousands of configs are kept, most of it to rank them and to write the
module, so many problems are planned side by side in processes of joblib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm import generate, opponents, prune, rank, registry
from tritongemm.config import Config
from tritongemm.problem import Problem
from tritongemm.rank import Predictions
from tritongemm.space import Space, space
from tritongemm.store import Store
from tritongemm.target import Target
from tritongemm.task import Plan, Search, Task, Watcher, nearest, no_search

FEW = 3  # so many problems are planned sooner than processes start


@dataclass(frozen=True)
class Planned:
    """What to try for one problem.

    Attributes:
        problem: what is tuned.
        space: before pruning.
        order: kept configs with their predictions, the best first.
        pruned: what each rule removed; without the kept configs, which `order` holds.
        module: path of the generated module with all of them.
    """

    problem: Problem
    space: Space
    order: Predictions
    pruned: prune.Pruned
    module: Path


class Others:
    """What other problems tell a strategy: winners to try first, and kernels that are compiled whoever else tries them.

    It is told the same in a resumed run as in the first one, by which some problems of the run have a record.

    Args:
        turns: all problems of the run, in their order.
        store: the records, and what is known of the candidates of problems that have one.
    """

    def __init__(self, turns: Sequence[Problem], store: Store) -> None:
        self._turns, self._own, self._store = turns, frozenset(turns), store
        self._asked: dict[Problem, Sequence[Config]] = {}
        self._kernels: defaultdict[Problem, set[str]] = defaultdict(set)  # by what problems have in common
        self._passed = 0  # problems whose kernels are among these

    def asked(self, problem: Problem, configs: Sequence[Config]) -> None:
        """A problem of the run asks for these first."""
        self._asked[problem] = configs

    def winners(self, problem: Problem) -> list[Config]:
        """Of the problems nearest to one, this run's own left out: a resumed one has some of them already."""
        return nearest(problem, [r for r in self._store.records() if r.problem not in self._own])

    def kernels(self, problem: Problem) -> Collection[str]:
        """Names of those that the problems before one ask for, where they differ from it in size alone; asked in turn."""
        while (other := self._turns[self._passed]) != problem:
            known = (t.config for t in self._store.trials(other).values())
            self._kernels[_kind(other)].update(c.kernel_name for c in self._asked.get(other, known))
            self._passed += 1
        return self._kernels[_kind(problem)]


def _kind(problem: Problem) -> Problem:
    return replace(problem, m=1, n=1, k=1)


def plan(problem: Problem, target: Target, folder: Path) -> Planned:
    """Plan one problem; the module goes to `folder`."""
    whole = space(problem, target)
    pruned = prune.prune(whole, problem, target)
    order = rank.rank(pruned.kept, problem, target)
    module = generate.module(problem, order.configs, target, folder)
    return Planned(problem, whole, order, pruned, module)


def plans(problems: Sequence[Problem], target: Target, folder: Path, jobs: int) -> Iterator[Planned]:
    """Plan problems, in their order, on `jobs` processes."""
    if len(problems) <= FEW or jobs == 1:
        yield from (plan(p, target, folder) for p in problems)
        return
    import joblib

    pool = joblib.Parallel(n_jobs=min(jobs, len(problems)), return_as="generator")
    yield from pool(joblib.delayed(plan)(p, target, folder) for p in problems)


def planned(tasks: Sequence[Task], what: Plan, jobs: int, others: Others, watcher: Watcher) -> Iterator[Task]:
    """The tasks in their order, each as soon as its strategy has said what to try first.

    Args:
        tasks: those that have been planned already are given back as they are.
        what: names strategy, budget and folder.
        jobs: processes to plan on.
        others: what they tell each other's strategies.
        watcher: told of the progress.
    """
    problems = [t.problem for t in tasks if t.search is None]
    searched = opponents.SEARCHED in what.backends
    made = plans(problems, tasks[0].judge.target, what.folder, jobs) if problems and searched else iter(())
    for task in tasks:
        if task.search is None:
            task.search = _search(task, next(made), what, others, watcher) if searched else no_search()
            task.batch = next(task.search)
            others.asked(task.problem, task.batch)
            watcher.step("plan")
        yield task


def _search(task: Task, made: Planned, what: Plan, others: Others, watcher: Watcher) -> Search:
    task.module = made.module
    watcher.planned(task.problem, len(made.space), made.pruned)
    known = others.winners(task.problem), made.order, others.kernels(task.problem)
    search: Search = registry.load("strategies", what.strategy).search(
        made.space, made.order.configs, what.budget, *known
    )
    return search

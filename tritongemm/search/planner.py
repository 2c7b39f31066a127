"""Stage: Problem, Target → what to try: the space pruned, ranked and written out as a module. Uses no GPU.

It takes a core a third of a second where thousands of configs are kept, most of it to rank them and to write the
module, so many problems are planned side by side in processes of joblib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritongemm.core.problem import Problem
from tritongemm.core.search_results import Predictions, Pruned
from tritongemm.core.space import Space
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune

# So many problems, or fewer, are planned sooner than processes start.
FEW_PROBLEMS = 3


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


def plan_search(problem: Problem, target: Target, folder: Path, backend: str) -> PlannedProblem:
    """Plan one problem.

    Args:
        problem: what is tuned.
        target: where.
        folder: where the module goes.
        backend: name of the backend that is searched, a `SearchedBackend`.
    """
    searched = registry.get(SearchedBackend, backend)
    space = searched.space(problem, target)
    pruned = prune.prune(space, problem, target)
    order = cost_model.rank(pruned.kept, problem, target)
    module = searched.write_candidates(problem, order.configs, target, folder)
    return PlannedProblem(problem, space, order, pruned, module)


def plan_searches(
    problems: Sequence[Problem], target: Target, folder: Path, backend: str, jobs: int
) -> Iterator[PlannedProblem]:
    """Plan problems, in their order, on `jobs` processes; the other arguments are `plan_search`'s."""
    if len(problems) <= FEW_PROBLEMS or jobs == 1:
        yield from (plan_search(p, target, folder, backend) for p in problems)
        return
    import joblib

    pool = joblib.Parallel(n_jobs=min(jobs, len(problems)), return_as="generator")
    yield from pool(joblib.delayed(plan_search)(p, target, folder, backend) for p in problems)

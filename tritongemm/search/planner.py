"""Stage: Problem, Target → what to try: the space pruned, ranked and written out as a module. Uses no GPU.

It takes a core a third of a second where thousands of configs are kept, most of it to rank them and to write the
module, so many problems are planned side by side in processes of joblib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritongemm.codegen import modules
from tritongemm.core import search_results
from tritongemm.core.problem import Problem
from tritongemm.core.search_results import Predictions
from tritongemm.core.space import Space
from tritongemm.core.target import Target
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

FEW = 3  # so many problems are planned sooner than processes start


@dataclass(frozen=True)
class SearchPlan:
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
    pruned: search_results.Pruned
    module: Path


def plan_search(problem: Problem, target: Target, folder: Path) -> SearchPlan:
    """Plan one problem; the module goes to `folder`."""
    whole = space(problem, target)
    pruned = prune.prune(whole, problem, target)
    order = cost_model.rank(pruned.kept, problem, target)
    module = modules.write_candidates(problem, order.configs, target, folder)
    return SearchPlan(problem, whole, order, pruned, module)


def plan_searches(problems: Sequence[Problem], target: Target, folder: Path, jobs: int) -> Iterator[SearchPlan]:
    """Plan problems, in their order, on `jobs` processes."""
    if len(problems) <= FEW or jobs == 1:
        yield from (plan_search(p, target, folder) for p in problems)
        return
    import joblib

    pool = joblib.Parallel(n_jobs=min(jobs, len(problems)), return_as="generator")
    yield from pool(joblib.delayed(plan_search)(p, target, folder) for p in problems)

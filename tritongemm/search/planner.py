"""Stage: Problem, Target → what to try: the space pruned, ranked and written out as a module. Uses no GPU.

It takes a core a third of a second where thousands of configs are kept, most of it to rank them and to write the
module, so many problems are planned side by side in processes of joblib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritongemm.codegen import modules
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.search_results import Predictions, Pruned
from tritongemm.core.space import Space
from tritongemm.core.target import Target
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

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


def plan_search(problem: Problem, target: Target, folder: Path) -> PlannedProblem:
    """Plan one problem; the module goes to `folder`."""
    whole = _open_space(problem, target)
    pruned = prune.prune(whole, problem, target)
    order = cost_model.rank(pruned.kept, problem, target)
    module = _write_candidates(problem, order.configs, target, folder)
    return PlannedProblem(problem, whole, order, pruned, module)


def _open_space(problem: Problem, target: Target) -> Space:
    """The whole space of the backend that is searched."""
    return space(problem, target)


def _write_candidates(problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
    """Write the module with the kernels of these configs; its path."""
    return modules.write_candidates(problem, configs, target, folder)


def plan_searches(problems: Sequence[Problem], target: Target, folder: Path, jobs: int) -> Iterator[PlannedProblem]:
    """Plan problems, in their order, on `jobs` processes."""
    if len(problems) <= FEW_PROBLEMS or jobs == 1:
        yield from (plan_search(p, target, folder) for p in problems)
        return
    import joblib

    pool = joblib.Parallel(n_jobs=min(jobs, len(problems)), return_as="generator")
    yield from pool(joblib.delayed(plan_search)(p, target, folder) for p in problems)

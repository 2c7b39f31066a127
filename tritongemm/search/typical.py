"""The batch of equal products that pruning and the cost model use in place of a grouped product."""

from dataclasses import replace

from tritongemm.core.problem import Problem


def typical(problem: Problem) -> Problem:
    """Return a batch with about the cost of the problem's groups together; any other problem unchanged.

    Each row is weighted by the size of its group, as a few large groups among many small ones decide which tiles are
    good.
    """
    if problem.groups is None:
        return problem
    rows = round(sum(c * c for c in problem.row_counts) / problem.m)
    return replace(problem, m=max(1, rows), batch=max(1, round(problem.m / max(1, rows))), groups=None)

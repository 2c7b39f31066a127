"""What pruning and the cost model take a grouped product for: as many equal products as groups have rows."""

from __future__ import annotations

from dataclasses import replace

from tritongemm.core.problem import Problem


def typical(problem: Problem) -> Problem:
    """A batch that costs about what the problem's groups do together; any other problem as it is.

    A row counts for the size of its group, so a few large groups among many small ones decide what tiles are good.
    """
    if problem.groups == 1:
        return problem
    counts = [rows for rows in problem.row_counts if rows]
    rows = round(sum(c * c for c in counts) / problem.m)
    return replace(
        problem, m=max(1, rows), batch=max(1, round(problem.m / max(1, rows))), groups=1, group_form="contiguous",
        spread="uniform", counts=(), room=0,
    )  # fmt: skip

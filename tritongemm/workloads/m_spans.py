"""Stage: rows with problems → spans of M: for each product of equal N, K and all else, which M a table shall have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem

MOST_WANTED = 8  # M of a span that are searched as a size of their own is, beside the powers of two.
_STEPS = 4  # M that are measured between a power of two and the next.
_FINEST_STEP = 16  # No tile of a matrix unit is lower, so between its multiples a tile more or less is the same tile.
_FEW = (1, 2, 4, 8)
_SEARCHED_FEW = (1, 4)


@dataclass(frozen=True)
class MSpan:
    """The M that a table over M of one product covers.

    Attributes:
        problem: the product, with an M of 1.
        low: the least M.
        high: the largest.
        wanted: M that calls are known to have, those of the most work first.
    """

    problem: Problem
    low: int
    high: int
    wanted: tuple[int, ...] = ()

    def at(self, m: int) -> Problem:
        """The product at an M."""
        return replace(self.problem, m=m)

    def searched(self) -> list[int]:
        """The M that are tuned as any size is: the ends, powers of two, and those that calls are known to have most."""
        powers = {2**e for e in range(4, self.high.bit_length())}
        inside = {m for m in powers | {*_SEARCHED_FEW} if self.low <= m <= self.high}
        return sorted(inside | {self.low, self.high} | set(self.wanted[:MOST_WANTED]))

    def ladder(self) -> list[int]:
        """The M that are measured first: those that are searched, midpoints and steps between them, and all wanted."""
        rungs, power = {*_FEW}, _FINEST_STEP
        while power <= self.high:
            step = max(_FINEST_STEP, power // _STEPS)
            rungs |= set(range(power, 2 * power, step))
            power *= 2
        return sorted({m for m in rungs if self.low <= m <= self.high} | set(self.searched()) | set(self.wanted))


def group_spans(rows: Iterable[FormatRow], m_range: tuple[int, int] | None = None) -> list[MSpan]:
    """The spans of M of a workload's products, in the order of their first rows.

    Args:
        rows: sizes, with how often each is called.
        m_range: least and largest M of every span; None for 1 to the largest M of the product's rows.
    """
    work: dict[Problem, dict[int, float]] = {}
    for row in rows:
        of_product = work.setdefault(replace(row.problem, m=1), {})
        of_product[row.problem.m] = of_product.get(row.problem.m, 0.0) + row.count
    spans = []
    for problem, counts in work.items():
        low, high = m_range or (1, max(counts))
        inside = [m for m in counts if low <= m <= high]
        wanted = sorted(inside, key=lambda m: (-counts[m] * replace(problem, m=m).bytes, m))
        spans.append(MSpan(problem, low, high, tuple(wanted)))
    return spans

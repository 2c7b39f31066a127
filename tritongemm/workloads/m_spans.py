"""Stage: rows with problems → spans of M: for each product of equal N, K and all else, which M a table shall have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.values import MOST

LEAST_SHARE = 0.002  # a product with a smaller share of a workload's time has no table
_OPERATIONS_A_BYTE = 200  # what a GPU computes while it reads a byte, in 16-bit floats, roughly
MOST_WANTED = 8  # M of a span that are searched as sizes of their own, beside powers of two
# Powers of two whose winners are among those of their neighbours.
_NOT_SEARCHED = (2, 4, 8, 128, 512, 1024, 4096)
SEARCH_BUDGET = 64  # configs that are tried at a searched M which no call is known to have
_FEW = (1, 2, 4)
FINE_UP_TO = 64  # M up to which the tiles of few rows are as high as M
_FINE = 8  # the step of the M up to there, which are all measured
_STEPS, _LEAST_STEP = (8, 16)  # from there on kernels are offered for M that are M / 8 apart, and at least 16


@dataclass(frozen=True)
class MSpan:
    """The M that a table over M of one product covers."""

    problem: Problem  # the product, with an M of 1
    low: int  # the least M
    high: int  # the largest
    wanted: tuple[int, ...] = ()  # M that calls are known to have, those of the most work first
    captured: tuple[Problem, ...] = ()  # the product at M where the rows of its groups were captured, in the order of M

    def at(self, m: int) -> Problem:
        """Return the product at an M, with rows spread as at the next larger captured M, else the largest."""
        problem = self.problem.at(m)
        if not self.captured:
            return problem
        return problem.spread_as(next((known for known in self.captured if known.m >= m), self.captured[-1]))

    def searched(self) -> list[int]:
        """Return the M that are tuned as sizes: the ends, powers of two, and those of most known calls."""
        powers = {2**e for e in range(self.high.bit_length())} - set(_NOT_SEARCHED)
        inside = {m for m in powers if self.low <= m <= self.high}
        return sorted(inside | {self.low, self.high} | set(self.wanted[:MOST_WANTED]))

    def ladder(self) -> list[int]:
        """Return the M that are always measured: those searched, those wanted, and steps between them."""
        rungs = {m for m in (*_FEW, *range(_FINE, FINE_UP_TO + 1, _FINE)) if self.low <= m <= self.high}
        return sorted(rungs | set(self.searched()) | set(self.wanted))

    def between(self, steps: int = _STEPS) -> list[int]:
        """Return M of a few tiles, each a multiple of the step to it; kernels of the first may serve fewer rows.

        `steps` are those from an M to twice it.
        """
        m, found = FINE_UP_TO, [FINE_UP_TO]
        while m < self.high:
            m += max(_LEAST_STEP, 1 << (m // steps).bit_length() - 1)
            found.append(m)
        return [m for m in found if self.low <= m <= self.high]


def drop_small(rows: Sequence[FormatRow]) -> tuple[list[FormatRow], dict[Problem, float]]:
    """Return the rows of products that take a share of a workload's time worth tuning, and the shares of the others.

    Shares are by product, with an M of 1. Times are estimated from bytes and operations, whatever the device.
    """
    work: dict[Problem, float] = {}
    for row in rows:
        of_row = row.count * (row.problem.bytes + row.problem.flops / _OPERATIONS_A_BYTE)
        product = row.problem.at(1)
        work[product] = work.get(product, 0.0) + of_row
    total = sum(work.values())
    small = {product: done / total for product, done in work.items() if done < LEAST_SHARE * total}
    return [row for row in rows if row.problem.at(1) not in small], small


def group_spans(
    rows: Iterable[FormatRow], m_range: tuple[int, int] | None = None, least_tokens: int = 0
) -> list[MSpan]:
    """Return the spans of M of a workload's products, in the order of their first rows.

    `m_range` is the least and largest M of every span; None for 1 to the largest M of the product's rows. It is in
    tokens where the least of a model's rows has `least_tokens` of them: groups have a row for each expert of a token.
    """
    work: dict[Problem, dict[int, float]] = {}
    captured: dict[Problem, dict[int, Problem]] = {}
    for row in rows:
        product = row.problem.at(1)
        of_product = work.setdefault(product, {})
        of_product[row.problem.m] = of_product.get(row.problem.m, 0.0) + row.count
        if (groups := row.problem.groups) and groups.counts and not groups.room:
            captured.setdefault(product, {}).setdefault(row.problem.m, row.problem)
    spans = []
    for problem, counts in work.items():
        low, high = m_range or (1, max(counts))
        if least_tokens and problem.groups:
            of_a_token = min(counts) // least_tokens
            low, high = low * of_a_token, min(high * of_a_token, MOST)
        inside = [m for m in counts if low <= m <= high]
        wanted = sorted(inside, key=lambda m: (-counts[m] * problem.at(m).bytes, m))
        known = captured.get(problem, {})
        spans.append(MSpan(problem, low, high, tuple(wanted), tuple(known[m] for m in sorted(known))))
    return spans

"""The choice of a race's winner from its samples.

Samples are taken in rounds, so two entries are compared round by round (Wilcoxon's signed-rank test): drift of clocks
and temperature affects both. A generated kernel must beat the baseline, and the best algorithm of the libraries that
race, by a margin and beyond the noise; a tie goes to the library.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, median

import numpy as np

from tritongemm.core.trial import BASELINE_ENTRY

MARGIN = 0.005  # A smaller share of the library's time is not worth leaving the library for.
CLEARLY_SLOWER_RATIO = 1.05  # An entry whose median is this much above the best's needs no test.
SIGNIFICANCE = 0.01  # the probability below which a difference of equal entries counts as real
FEWEST_TESTED_ROUNDS = 5
_MOST_EXACT_ROUNDS = 50  # The sums of ranks of more rounds are as good as normally distributed.


@dataclass(frozen=True)
class Choice:
    """The outcome of a race."""

    # The candidate that is compared with the baseline: our fastest kernel if it beats the best library algorithm by the
    # margin beyond the noise, else that algorithm.
    name: str
    library_won: bool  # this candidate does not beat the baseline beyond the noise and the margin
    tie: bool  # candidate and baseline differ by no more than the noise or the margin


def faster(a: Sequence[float], b: Sequence[float]) -> bool:
    """Say whether `a` is faster than `b` beyond the noise; samples of equal position were taken in one round."""
    rounds = min(len(a), len(b))
    pairs = [(x, y) for x, y in zip(a[:rounds], b[:rounds], strict=True) if x != y]
    # Medians are compared before the test, which takes longer.
    if len(pairs) < FEWEST_TESTED_ROUNDS or median(a[:rounds]) >= median(b[:rounds]):
        return False
    return _less([x - y for x, y in pairs])


def _less(differences: Sequence[float]) -> bool:
    """Return whether differences, of which none is 0, are below 0 beyond the noise (not by SciPy: it loads for 0.7 s).

    Equal distances share the mean of their ranks. Exact probabilities are on the safe side then.
    """
    signed, n = np.array(differences), len(differences)
    _, place, ties = np.unique(np.abs(signed), return_inverse=True, return_counts=True)
    above = float((np.cumsum(ties) - (ties - 1) / 2)[place[signed > 0]].sum())
    if n <= _MOST_EXACT_ROUNDS:
        return above <= _largest_sum(n)
    variance = (n * (n + 1) * (2 * n + 1) - float((ties**3 - ties).sum()) / 2) / 24
    return NormalDist(n * (n + 1) / 4, sqrt(variance)).cdf(above) < SIGNIFICANCE


@functools.cache
def _largest_sum(n: int) -> int:
    """Return the largest sum of the ranks above 0 among `n` that is rarer than `SIGNIFICANCE`; -1 where none is."""
    ways = np.ones(1)  # of signs that give each sum
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    return int(np.searchsorted(np.cumsum(ways / 2.0**n), SIGNIFICANCE)) - 1


def not_clearly_slower(samples: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the baseline, and the candidates whose median is not clearly above the best's."""
    return _near_best(samples) | (samples.keys() & {BASELINE_ENTRY})


def still_racing(samples: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the entries that stay in a race: the baseline, the two best, and all not clearly slower than the best."""
    candidates, baseline = _fastest_first(samples), samples.keys() & {BASELINE_ENTRY}
    if not candidates:
        return baseline
    unbeaten = {n for n in _near_best(samples) if not faster(samples[candidates[0]], samples[n])}
    return baseline | set(candidates[:2]) | unbeaten


def decided(samples: Mapping[str, Sequence[float]]) -> bool:
    """Say whether more rounds can change nothing: the best beats the next and is distinct from the baseline."""
    candidates = _fastest_first(samples)
    if not candidates:
        return True
    rivals = [*candidates[1:2], *(n for n in samples if n == BASELINE_ENTRY)]
    best = samples[candidates[0]]
    return all(faster(best, samples[r]) or faster(samples[r], best) for r in rivals)


def choose(samples: Mapping[str, Sequence[float]], margin: float = MARGIN, libraries: Collection[str] = ()) -> Choice:
    """Return the winner of a race of at least one candidate, whose samples are by config name or `BASELINE_ENTRY`.

    `margin` is the relative gain below which an algorithm of `libraries` is kept against a generated kernel.
    """
    name = _standing(samples, margin, libraries)
    if BASELINE_ENTRY not in samples:
        return Choice(name, library_won=False, tie=False)
    candidate, baseline = samples[name], samples[BASELINE_ENTRY]
    gain = _gain(candidate, baseline)
    won = gain >= margin and faster(candidate, baseline)
    lost = faster(baseline, candidate) and -gain >= margin
    return Choice(name, library_won=not won, tie=not won and not lost)


def _standing(samples: Mapping[str, Sequence[float]], margin: float, libraries: Collection[str]) -> str:
    """Return the candidate that is compared with the baseline."""
    ranked = _fastest_first(samples)
    algorithm = next((n for n in ranked if n in libraries), None)
    if algorithm is None:
        return ranked[0]
    theirs = samples[algorithm]

    def stands(kernel: str) -> bool:
        # An entry that left the race earlier was slower then; too few of its rounds are left for a test.
        ours = samples[kernel]
        return _gain(ours, theirs) >= margin and (len(theirs) < len(ours) or faster(ours, theirs))

    # One slow round of a brief race hides what a kernel gains: then it may show at one that is nearly as fast.
    return next((n for n in ranked if n not in libraries and stands(n)), algorithm)


def _near_best(samples: Mapping[str, Sequence[float]]) -> set[str]:
    """Return the candidates whose median is less than `CLEARLY_SLOWER_RATIO` times the best's."""
    medians = {n: median(samples[n]) for n in samples if n != BASELINE_ENTRY}
    limit = CLEARLY_SLOWER_RATIO * min(medians.values(), default=0.0)
    return {n for n, seconds in medians.items() if seconds < limit}


def _gain(samples: Sequence[float], others: Sequence[float]) -> float:
    """Return how much faster the first is than the others, relative."""
    return median(others) / median(samples) - 1


def _fastest_first(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of the candidates by their medians."""
    return sorted((n for n in samples if n != BASELINE_ENTRY), key=lambda n: median(samples[n]))

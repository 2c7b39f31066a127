"""Stage: samples of the final race → winner.

Samples come in rounds, so two contenders are compared round by round (Wilcoxon's signed ranks): drift of clocks and
temperature meets both. A tie is a tie, and a tie with the library goes to the library. In a race the library's name
is the empty string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LIBRARY = ""
CLEARLY = 1.05  # this much slower than the best needs no test
CONFIDENCE = 0.01
MARGIN = 0.005  # a gain below this is not worth leaving the library for


@dataclass(frozen=True)
class Choice:
    """The outcome of a race.

    Attributes:
        name: fastest candidate of ours.
        library_won: no candidate beats the library beyond the noise and the margin.
        tie: candidate and library can't be told apart, or by less than the margin.
    """

    name: str
    library_won: bool
    tie: bool


def faster(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether `a` is faster than `b` beyond the noise; samples of equal position were taken in one round."""
    from scipy.stats import wilcoxon

    rounds = min(len(a), len(b))
    pairs = [(x, y) for x, y in zip(a[:rounds], b[:rounds], strict=True) if x != y]
    if len(pairs) < 5:
        return False
    statistic = wilcoxon([x for x, _ in pairs], [y for _, y in pairs], alternative="less")
    return bool(statistic.pvalue < CONFIDENCE and median(a[:rounds]) < median(b[:rounds]))


def still_racing(samples: Mapping[str, Sequence[float]]) -> set[str]:
    """Who stays in the race: the library, the two best of ours, and whoever is not clearly slower than the best."""
    ours = sorted((n for n in samples if n != LIBRARY), key=lambda n: median(samples[n]))
    kept = {n for n in samples if n == LIBRARY} | set(ours[:2])
    if ours:
        best = samples[ours[0]]
        kept |= {n for n in ours if median(samples[n]) < CLEARLY * median(best) and not faster(best, samples[n])}
    return kept


def decided(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether more rounds could change nothing: the best of ours beats the next, and is told from the library."""
    ours = sorted((n for n in samples if n != LIBRARY), key=lambda n: median(samples[n]))
    if not ours:
        return True
    rivals = [*ours[1:2], *(n for n in samples if n == LIBRARY)]
    best = samples[ours[0]]
    return all(faster(best, samples[r]) or faster(samples[r], best) for r in rivals)


def choose(samples: Mapping[str, Sequence[float]], margin: float = MARGIN) -> Choice:
    """The winner of a race of at least one candidate.

    Args:
        samples: seconds by name, the library's under the empty string.
        margin: relative gain below which the library is kept.
    """
    name = min((n for n in samples if n != LIBRARY), key=lambda n: median(samples[n]))
    if LIBRARY not in samples:
        return Choice(name, library_won=False, tie=False)
    ours, library = samples[name], samples[LIBRARY]
    gain = median(library) / median(ours) - 1
    won = gain >= margin and faster(ours, library)
    lost = faster(library, ours) and -gain >= margin
    return Choice(name, library_won=not won, tie=not won and not lost)

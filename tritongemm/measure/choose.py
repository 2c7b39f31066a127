"""Stage: samples of the final race → winner.

Samples come in rounds, so two contenders are compared round by round (Wilcoxon's signed ranks): drift of clocks and
temperature meets both. A tie is a tie, and a tie with the library goes to the library. In a race the library's name
is the empty string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tritongemm.core.tuning_options import MARGIN

BASELINE_ENTRY = ""
CLEARLY = 1.05  # this much slower than the best needs no test
CONFIDENCE = 0.01
FEWEST = 5  # rounds that can tell anything


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
    rounds = min(len(a), len(b))
    pairs = [(x, y) for x, y in zip(a[:rounds], b[:rounds], strict=True) if x != y]
    if len(pairs) < FEWEST or median(a[:rounds]) >= median(b[:rounds]):  # before the test, which takes longer
        return False
    return _less([x for x, _ in pairs], [[y for _, y in pairs]])[0]


def beaten(best: Sequence[float], others: Mapping[str, Sequence[float]]) -> set[str]:
    """Which of the others `best` is `faster` than; tested all at once, as each test takes 0.4 ms."""
    alike = {
        n: s for n, s in others.items()
        if len(s) == len(best) >= FEWEST and all(x != y for x, y in zip(best, s, strict=True))
    }  # fmt: skip
    found = {n for n in others.keys() - alike.keys() if faster(best, others[n])}
    less = _less(best, list(alike.values())) if alike else []
    return found | {n for n, yes in zip(alike, less, strict=True) if yes and median(best) < median(alike[n])}


def _less(a: Sequence[float], others: Sequence[Sequence[float]]) -> list[bool]:
    """Whether `a` is less than each of the others, round by round; no two samples of a round are equal."""
    from scipy.stats import wilcoxon

    # Left to itself, it takes 0.1 s to permute few rounds with two equal distances. Exact is on the safe side then.
    method = "exact" if len(a) <= 50 else "auto"
    tested = wilcoxon([list(a)] * len(others), others, alternative="less", method=method, axis=1)
    return [bool(p < CONFIDENCE) for p in tested.pvalue]


def still_racing(samples: Mapping[str, Sequence[float]]) -> set[str]:
    """Who stays in the race: the library, the two best of ours, and whoever is not clearly slower than the best."""
    ours = sorted((n for n in samples if n != BASELINE_ENTRY), key=lambda n: median(samples[n]))
    kept = {n for n in samples if n == BASELINE_ENTRY} | set(ours[:2])
    if ours:
        best = samples[ours[0]]
        close = {n: samples[n] for n in ours if median(samples[n]) < CLEARLY * median(best)}
        kept |= close.keys() - beaten(best, close)
    return kept


def decided(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether more rounds could change nothing: the best of ours beats the next, and is told from the library."""
    ours = sorted((n for n in samples if n != BASELINE_ENTRY), key=lambda n: median(samples[n]))
    if not ours:
        return True
    rivals = [*ours[1:2], *(n for n in samples if n == BASELINE_ENTRY)]
    best = samples[ours[0]]
    return all(faster(best, samples[r]) or faster(samples[r], best) for r in rivals)


def choose(samples: Mapping[str, Sequence[float]], margin: float = MARGIN) -> Choice:
    """The winner of a race of at least one candidate.

    Args:
        samples: seconds by name, the library's under the empty string.
        margin: relative gain below which the library is kept.
    """
    name = min((n for n in samples if n != BASELINE_ENTRY), key=lambda n: median(samples[n]))
    if BASELINE_ENTRY not in samples:
        return Choice(name, library_won=False, tie=False)
    ours, library = samples[name], samples[BASELINE_ENTRY]
    gain = median(library) / median(ours) - 1
    won = gain >= margin and faster(ours, library)
    lost = faster(library, ours) and -gain >= margin
    return Choice(name, library_won=not won, tie=not won and not lost)

"""The selection of finalists, which are verified and raced, from the screened trials of all backends."""

from __future__ import annotations

from collections.abc import Iterable

from tritongemm.core.trial import Trial
from tritongemm.tuning.roster import is_library, is_searched

LIBRARY_PLACES = 20
NEAR = 1.06  # of 736 races on H200s no winner had been screened more than 1.047 times the best


def pick_finalists(trials: Iterable[Trial], count: int) -> tuple[list[Trial], list[Trial]]:
    """Select the trials whose configs race first, and those that race next if all of the first are wrong.

    `count` places go to compiled kernels: the best of every backend gets one; a backend other than the searched one
    gets at most a quarter, and all of those together at most half. Libraries get additional places, each for its first
    choice and its best, up to `LIBRARY_PLACES`. Beyond a quarter of the places, only candidates that are `NEAR` the
    best of all race: verifying the others would take time for nothing.

    Args:
        trials: screened; of one library in its own order of preference.
        count: places.
    """
    passed = [t for t in trials if t.status == "ok"]
    ranked = sorted(passed, key=lambda t: (t.seconds, t.config))
    by_backend: dict[str, list[Trial]] = {}
    for trial in ranked:
        by_backend.setdefault(trial.config.backend, []).append(trial)
    own = [t for t in ranked if is_searched(t.config.backend)]
    by_backend = {n: found for n, found in by_backend.items() if not is_searched(n)}
    libraries = {n: by_backend.pop(n) for n in list(by_backend) if is_library(n)}
    share = max(1, count // 4)

    def hopeful(found: list[Trial], places: int) -> list[Trial]:
        near = sum(t.seconds <= NEAR * ranked[0].seconds for t in found)
        return found[: min(places, max(share, near))]

    invited = sorted(((place, t) for found in by_backend.values() for place, t in enumerate(found[:share])), key=_place)
    first = [t for _, t in invited[: max(len(by_backend), count // 2)]]
    reserved = share if libraries else 0
    first += hopeful(own, max(1, count - len(first) - reserved))
    for name, found in libraries.items():
        first += hopeful(found, LIBRARY_PLACES)
        favourite = next(t for t in passed if t.config.backend == name)
        first += [] if favourite in first else [favourite]
    first.sort(key=lambda t: (t.seconds, t.config))
    racing = {t.config for t in first}
    rest = [t for t in ranked if t.config not in racing]
    return first, sorted(rest, key=lambda t: not is_searched(t.config.backend))


def _place(invited: tuple[int, Trial]) -> tuple[int, float]:
    return invited[0], invited[1].seconds

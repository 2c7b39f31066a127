"""Strategy: a few large batches, each where a learned correction of the model expects the fastest.

Of configs that differ only in how many rows of tiles are walked together and how consecutive launches overlap the best
predicted stands for all; those like the fastest are tried at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from tritongemm.core.config import Config
from tritongemm.core.search_results import Predictions
from tritongemm.core.space import Space
from tritongemm.core.trial import Trial
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.strategies._candidates import CandidateSet
from tritongemm.search.strategies._gaussian_process import Surrogate, features

Ints = NDArray[np.intp]
SHARE = 0.03  # of the kept configs that the default budget tries,
FEWEST, MOST = 48, 128  # within these bounds
FIRST = 0.25  # of the budget that goes to the first batch
ROUNDS = 6  # batches; each is a barrier between compiling and timing
PATIENCE, GAIN = 3, 0.003  # stop after so many batches that gain less than this, but not before FEWEST configs
LEADERS = 4  # whose neighbours are looked at
LOCAL = 0.6  # of a batch that goes to these neighbours
LAST = 0.125  # of the budget that goes to other launches of the fastest,
WITHIN = 1.1  # those at most so much slower than the best; templates that are, get a place in each batch
BOLD = (1.0, 0.7, 0.5, 0.3, 0.0)  # standard deviations an unsure config is favoured by, batch after batch


def search(
    space: Space,
    order: Sequence[Config],
    budget: int,
    seeds: Sequence[Config] = (),
    expected: Predictions | None = None,
    compiled: Collection[str] = frozenset(),
) -> Generator[list[Config], list[Trial], None]:
    """Yields batches to try and is sent their trials; `order` and equal trials give equal batches.

    Args:
        space: where neighbours are looked for, and whose problem and target shape the features.
        order: kept configs, the predicted best first.
        budget: most configs to try; 0 for 3 % of `order`, at least 48 and at most 128.
        seeds: winners of similar problems, tried first; one that was pruned stands for the nearest kept config.
        expected: predictions for `order`; made here when not given.
        compiled: unused.
    """
    kept = CandidateSet(order)
    count = len(kept.order)
    budget = min(count, budget or default_budget(count))
    first = max(1, min(budget, round(FIRST * budget)))
    batch = list(dict.fromkeys([*kept.seeds(seeds), *kept.spread(first)]))[:first]
    searched = budget - round(LAST * budget) * (kept.twinned and budget < count)
    each = max(1, -(-(searched - first) // (ROUNDS - 1)))
    trials = {t.config: t for t in (yield batch)}
    surrogate: Surrogate | None = None
    stale = 0
    for number in range(searched):
        room = min(each, searched - len(trials))
        if room <= 0 or (stale >= PATIENCE and len(trials) >= FEWEST):
            break
        before = best(trials.values())
        if before == np.inf:
            # Nothing to learn from yet: on along the order.
            batch = [c for c in kept.spread(len(trials) + room) if c not in trials][:room]
        else:
            surrogate = surrogate or _surrogate(space, kept, expected)
            with threadpool_limits(1):  # compilers hold the other cores, and threads that spin for them cost tenfold
                batch = _refine(space, kept, surrogate, trials, room, BOLD[min(number, len(BOLD) - 1)])
        trials |= {t.config: t for t in (yield batch)}
        stale = 0 if best(trials.values()) < before * (1 - GAIN) or before == np.inf else stale + 1
    if last := _twins(kept, trials)[: budget - len(trials)]:
        yield last


def default_budget(count: int) -> int:
    """Configs to try of `count` kept ones."""
    return min(count, max(FEWEST, min(MOST, round(SHARE * count))))


def best(trials: Iterable[Trial]) -> float:
    """Shortest seconds so far; infinite while all have failed."""
    return min((t.seconds for t in trials if t.status == "ok"), default=float("inf"))


def _surrogate(space: Space, kept: CandidateSet, expected: Predictions | None) -> Surrogate:
    known = (expected or cost_model.rank(kept.order, space.problem, space.target)).of(kept.order)
    return Surrogate(features(kept, known, space.problem, space.target), np.log(known.seconds))


def _refine(
    space: Space, kept: CandidateSet, surrogate: Surrogate, trials: dict[Config, Trial], room: int, bold: float
) -> list[Config]:
    """The next batch: neighbours of the leaders, one of each template close behind, then the most promising anywhere."""
    ok = [t.status == "ok" for t in trials.values()]
    logs = np.log([t.seconds if good else np.nan for t, good in zip(trials.values(), ok, strict=True)])
    surrogate.fit(np.array([kept.place[c] for c in trials]), logs)
    tried = {kept.first[kept.place[c]] for c in trials}
    found = (kept.stand_in(n) for t in _fastest(trials)[:LEADERS] for n in space.neighbours(t.config))
    places = np.array(list(dict.fromkeys(p for p in found if p is not None and p not in tried)), dtype=np.intp)
    chosen = surrogate.choose(places, round(LOCAL * room), bold) if len(places) else []
    for rival in _rivals(kept, trials)[: (room - len(chosen)) // 2]:
        untried = np.setdiff1d(rival, [*tried, *chosen])
        chosen += surrogate.choose(untried, 1, bold) if len(untried) else []
    rest = np.setdiff1d(kept.first, [*tried, *chosen])
    if not len(rest):  # nothing but other launches is left
        rest = np.setdiff1d(np.arange(len(kept.order)), [*(kept.place[c] for c in trials), *chosen])
    if len(rest):
        chosen += surrogate.choose(rest, room - len(chosen), bold)
    return [kept.order[i] for i in chosen]


def _rivals(kept: CandidateSet, trials: dict[Config, Trial]) -> list[Ints]:
    """Places of each template that is behind, but not by more than a few of its configs may make up; least tried first."""
    first, *others = _fastest(trials)
    near = {t.config.template for t in others if t.seconds <= WITHIN * first.seconds} - {first.config.template}
    tried = Counter(c.template for c in trials)
    names = sorted(near, key=lambda name: (tried[name], name))
    return [kept.first[kept.membership[kept.first, kept.templates.index(name)] > 0] for name in names]


def _fastest(trials: dict[Config, Trial]) -> list[Trial]:
    return sorted((t for t in trials.values() if t.status == "ok"), key=lambda t: (t.seconds, t.config))


def _twins(kept: CandidateSet, trials: dict[Config, Trial]) -> list[Config]:
    """Configs that differ from one of the fastest only in their launch, the fastest's first."""
    near = [t.config for t in _fastest(trials) if t.seconds <= WITHIN * best(trials.values())]
    return list(dict.fromkeys(c for leader in near for c in kept.twins(leader) if c not in trials))

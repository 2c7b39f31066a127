"""The guided strategy, which tries a few large batches where a correction fitted to trials expects the fastest.

Kernels that other sizes of a run have compiled cost milliseconds, others half a core-second. So a batch also contains
the most promising of the compiled ones, and compiles a third as many others, unless a budget is given. Where each core
has many sizes to compile for, it compiles a quarter as many, fewer variants of launches, and ends sooner.

Of configs that differ only in GROUP_M and in how programs are launched, the best predicted represents all; variants of
the fastest are tried at the end.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.space import Space
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Search, SearchPlan, Strategy
from tritongemm.plugins.contracts.searching import Predictions
from tritongemm.search.strategies._candidates import CandidateSet
from tritongemm.search.strategies._gaussian_process import Surrogate, features

Ints = NDArray[np.intp]
# share of the kept configs that the default budget tries, within the two bounds that follow
BUDGET_SHARE = 0.03
# bounds of the default budget; no search of few sizes ends before the least is tried
FEWEST_CONFIGS, MOST_CONFIGS = 48, 128
# share of the budget for the first batch
FIRST_SHARE = 0.25
# batches of a search; each is a barrier between compiling and timing
ROUNDS = 6
# A batch adds up to this number of configs whose kernels other sizes have had compiled. With half as many, it has
# only this share of the configs that it would have had without them.
MOST_BUILT, SHARE_BESIDE_BUILT = 8, 1 / 3
# from this number of sizes per compiling core the share is smaller: files of 56 sizes took a fifth less on 16 cores
MANY_PER_CORE, SHARE_OF_MANY = 3, 1 / 4
# A search also ends after these trials and a last batch of launches: of 64 sizes all after 56 trials gained 0.1 to
# 0.3 %, and was an eighth of all compiles; from 44 to 56 trials 0.16 %, for 1 to 8 % of them.
MOST_TRIALS_OF_MANY = 44
# From this number of sizes per core the GPU is busy longer than compilers: of as few configs a size fewer are tried.
# Of 168 sizes of experts on an H200 the best of 28 took 0.08 % longer than that of 32, of 192 with 1,000 configs 1.2 %.
CROWD_PER_CORE, FEW_CONFIGS, MOST_TRIALS_OF_CROWD = 8, 256, 28
# batches in a row, each with a smaller gain than this share of the best time, that end the search
PATIENCE_BATCHES, LEAST_GAIN = 2, 0.003
# number of the fastest whose neighbours are looked at
LEADERS = 4
# share of a batch for these neighbours
NEIGHBOUR_SHARE = 0.6
# share of the budget for other launches of the fastest, at the end
LAUNCH_VARIANT_SHARE = 0.125
# Configs within this factor of the best time have their launches varied; templates within it get a place in a batch.
CLOSE_FACTOR = 1.1
# With as many sizes a launch that needs a kernel of its own is tried of configs within this factor only: of 500 such
# launches of configs more than 3 % behind three were the fastest of their size.
CLOSE_FACTOR_OF_MANY = 1.03
# standard deviations by which an unsure config is favoured, batch after batch
EXPLORATION_DEVIATIONS = (1.0, 0.7, 0.5, 0.3, 0.0)


class Guided(Strategy):
    """A few large batches where a fitted correction of the model expects the fastest, and kernels of other sizes."""

    independent = True

    def most_configs(self, kept: int, budget: int, population: int) -> int:
        """Return the budget, which is 3 % of the configs by default, from 48 to 128."""
        return min(kept, budget or default_budget(kept))

    def search(self, plan: SearchPlan, budget: int) -> Search:
        """Yield seeds and the best predicted first; a budget of 0 tries 3 % of the configs, from 48 to 128.

        Kernels that are already compiled come on top of the 3 %; a given budget limits all configs.
        """
        space, kept = plan.space, CandidateSet(plan.expected.configs)
        count = len(kept.order)
        names = () if budget else plan.built
        many = not budget and plan.problems_per_core >= MANY_PER_CORE
        share = SHARE_OF_MANY if many else SHARE_BESIDE_BUILT
        crowded = plan.problems_per_core >= CROWD_PER_CORE and count <= FEW_CONFIGS
        most = MOST_TRIALS_OF_CROWD if crowded else MOST_TRIALS_OF_MANY
        compiled_factor = CLOSE_FACTOR_OF_MANY if many else CLOSE_FACTOR
        budget = self.most_configs(count, budget, plan.population)
        first = max(1, min(budget, round(FIRST_SHARE * budget)))
        batch = list(dict.fromkeys([*kept.seeds(plan.seeds), *kept.pick_varied(first)]))[:first]
        searched = budget - round(LAUNCH_VARIANT_SHARE * budget) * (kept.has_launch_variants and budget < count)
        each = max(1, cdiv(searched - first, ROUNDS - 1))
        trials = {t.config: t for t in (yield batch)}
        paid = len(trials)
        surrogate: Surrogate | None = None
        stale = 0
        for number in range(searched):
            room = min(each, searched - paid)
            patient = stale < PATIENCE_BATCHES or len(trials) < FEWEST_CONFIGS
            if room <= 0 or not patient or (many and len(trials) >= most):
                break
            before = best_seconds(trials.values())
            if before == np.inf:
                # Nothing to fit yet: go on in the given order.
                batch = [c for c in kept.pick_varied(len(trials) + room) if c not in trials][:room]
                paid += len(batch)
            else:
                surrogate = surrogate or _surrogate(space, kept, plan.expected)
                exploration = EXPLORATION_DEVIATIONS[min(number, len(EXPLORATION_DEVIATIONS) - 1)]
                # Compilers use the other cores, and threads that spin for them cost tenfold.
                with _blas().limit(limits=1):
                    built = _built(kept, trials, names)
                    room = ceil(share * room) if 2 * len(built) >= MOST_BUILT else room
                    batch = _refine(space, kept, surrogate, trials, room, exploration)
                    paid += len(batch)
                    if len(built := np.setdiff1d(built, [kept.place[c] for c in batch])):
                        batch += [kept.order[i] for i in surrogate.choose(built, MOST_BUILT, exploration)]
            trials |= {t.config: t for t in (yield batch)}
            gained = best_seconds(trials.values()) < before * (1 - LEAST_GAIN) or before == np.inf
            stale = 0 if gained else stale + 1
        left = (most if many else budget) - len(trials)
        if last := _launch_variants(kept, trials, names, compiled_factor)[: max(budget - searched, left)]:
            yield last


def default_budget(count: int) -> int:
    """Return the number of configs to try of `count` kept ones."""
    return min(count, max(FEWEST_CONFIGS, min(MOST_CONFIGS, round(BUDGET_SHARE * count))))


def best_seconds(trials: Iterable[Trial]) -> float:
    """Return the shortest seconds so far; infinite if all have failed."""
    return min((t.seconds for t in trials if t.status == "ok"), default=float("inf"))


@cache
def _blas() -> ThreadpoolController:
    """Return the limiter of linear algebra's threads, of the loaded libraries, found once: it takes milliseconds."""
    return ThreadpoolController()


def _surrogate(space: Space, kept: CandidateSet, expected: Predictions) -> Surrogate:
    known = expected.select(kept.order)
    return Surrogate(features(kept, known, space.problem, space.target), np.log(known.seconds))


def _refine(
    space: Space, kept: CandidateSet, surrogate: Surrogate, trials: dict[Config, Trial], room: int, exploration: float
) -> list[Config]:
    """Return the next batch: neighbours of the leaders, one of each template close behind, then the most promising."""
    ok = [t.status == "ok" for t in trials.values()]
    logs = np.log([t.seconds if good else np.nan for t, good in zip(trials.values(), ok, strict=True)])
    surrogate.fit(np.array([kept.place[c] for c in trials]), logs)
    tried = {kept.first[kept.place[c]] for c in trials}
    found = (kept.stand_in(n) for t in _fastest(trials)[:LEADERS] for n in space.neighbours(t.config))
    places = np.array(list(dict.fromkeys(p for p in found if p is not None and p not in tried)), dtype=np.intp)
    chosen = surrogate.choose(places, round(NEIGHBOUR_SHARE * room), exploration) if len(places) else []
    for rival in _rivals(kept, trials)[: (room - len(chosen)) // 2]:
        untried = np.setdiff1d(rival, [*tried, *chosen])
        chosen += surrogate.choose(untried, 1, exploration) if len(untried) else []
    rest = np.setdiff1d(kept.first, [*tried, *chosen])
    if not len(rest):  # only other launches are left
        rest = np.setdiff1d(np.arange(len(kept.order)), [*(kept.place[c] for c in trials), *chosen])
    if len(rest):
        chosen += surrogate.choose(rest, room - len(chosen), exploration)
    return [kept.order[i] for i in chosen]


def _built(kept: CandidateSet, trials: dict[Config, Trial], names: Collection[str]) -> Ints:
    """Return the places of the configs not tried in any launch, whose kernels are among those named."""
    tried = {kept.first[kept.place[c]] for c in trials}
    names = set(names)  # a copy: the run adds to them in another thread
    firsts = np.unique(kept.first).tolist() if names else ()
    found = [i for i in firsts if i not in tried and kept.order[i].kernel_name in names]
    return np.array(found, dtype=np.intp)


def _rivals(kept: CandidateSet, trials: dict[Config, Trial]) -> list[Ints]:
    """Return the places of the configs of each template close behind the best; the least tried first."""
    first, *others = _fastest(trials)
    near = {t.config.template for t in others if t.seconds <= CLOSE_FACTOR * first.seconds} - {first.config.template}
    tried = Counter(c.template for c in trials)
    names = sorted(near, key=lambda name: (tried[name], name))
    return [kept.first[kept.membership[kept.first, kept.templates.index(name)] > 0] for name in names]


def _fastest(trials: dict[Config, Trial]) -> list[Trial]:
    return sorted((t for t in trials.values() if t.status == "ok"), key=lambda t: (t.seconds, t.config))


def _launch_variants(
    kept: CandidateSet, trials: dict[Config, Trial], names: Collection[str], factor: float
) -> list[Config]:
    """Return the configs that differ from one of the fastest only in their launch, the fastest's first.

    A launch whose kernel is compiled, for a trial or under one of `names`, is among them for configs up to
    `CLOSE_FACTOR` times as slow as the best; any other launch up to `factor` times.
    """
    best = best_seconds(trials.values())
    compiled = {c.kernel_name for c in trials} | set(names)
    near = [t for t in _fastest(trials) if t.seconds <= CLOSE_FACTOR * best]
    variants = ((t.seconds, c) for t in near for c in kept.launch_variants(t.config) if c not in trials)
    worth = (c for s, c in variants if s <= factor * best or c.kernel_name in compiled)
    return list(dict.fromkeys(worth))

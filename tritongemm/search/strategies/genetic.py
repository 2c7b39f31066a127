"""Strategy: generations bred from the fastest: tournaments, uniform crossover, mutation, elites.

As in hipBLASLt's TuningDriver, scaled down from its 512 x 30 to what a few minutes of one GPU allow. Offspring that the
rules pruned, or that were tried before, become the nearest kept config that is new, so every trial is of a kept config
and none is repeated; the winners are verified like anybody else's.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace

from tritongemm.core.config import AXES, Config
from tritongemm.core.search_results import Predictions
from tritongemm.core.space import Space, TemplateSpace
from tritongemm.core.trial import Trial
from tritongemm.search.strategies._candidates import CandidateSet

POPULATION, GENERATIONS = 32, 8
TOURNAMENT = 2  # contestants
CROSSOVER = 0.9  # share of children with two parents
ELITES = 0.1  # share of the population that lives on
PATIENCE, GAIN = 3, 8e-4  # stop after so many generations that gain less than this
SEED = 0


def search(
    space: Space,
    order: Sequence[Config],
    budget: int,
    seeds: Sequence[Config] = (),
    expected: Predictions | None = None,
    compiled: Collection[str] = frozenset(),
) -> Generator[list[Config], list[Trial], None]:
    """Yields generations to try and is sent their trials; the same trials give the same generations.

    Args:
        space: axes that children are bred along.
        order: kept configs, the predicted best first; the first generation is half its best, half at random.
        budget: most configs to try; 0 for 8 generations of 32.
        seeds: winners of similar problems, part of the first generation.
        expected: unused.
        compiled: unused.
    """
    rng, kept = random.Random(SEED), CandidateSet(order)
    axes = {a.template: a for a in space.axes}
    budget = min(len(kept.order), budget or POPULATION * GENERATIONS)
    size = max(1, min(POPULATION, -(-budget // 4)))
    first = dict.fromkeys([*kept.seeds(seeds), *kept.spread(size // 2 + 1)][:size])
    strangers = [c for c in kept.order if c not in first]
    batch = [*first, *rng.sample(strangers, min(len(strangers), size - len(first)))]
    tried: set[Config] = set()
    alive: list[Trial] = []
    stale = 0
    while batch and stale < PATIENCE:
        before = alive[0].seconds if alive else float("inf")
        tried.update(batch)
        fresh = [t for t in (yield batch) if t.status == "ok"]
        elites = alive[: max(1, round(ELITES * size))]
        # Everyone alive may breed once more, so that a weak generation does not lose its parents.
        alive = sorted([*elites, *fresh], key=_fitness)[:size] if fresh else alive
        stale = 0 if alive and alive[0].seconds < before * (1 - GAIN) else stale + 1
        batch = []
        while len(batch) < min(size, budget - len(tried)):
            child = kept.nearest(_breed(alive, kept, axes, rng), tried.union(batch))
            if child is None:
                break
            batch.append(child)


def _fitness(trial: Trial) -> tuple[float, Config]:
    return trial.seconds, trial.config


def _breed(alive: Sequence[Trial], kept: CandidateSet, axes: dict[str, TemplateSpace], rng: random.Random) -> Config:
    """A child of two winners of tournaments; a stranger while nobody is alive."""
    if not alive:
        return rng.choice(kept.order)
    mother, father = (min(rng.choices(alive, k=TOURNAMENT), key=_fitness).config for _ in range(2))
    child = _cross(mother, father, rng) if rng.random() < CROSSOVER else mother
    return _mutate(child, axes[child.template], rng) if child.template in axes else child


def _cross(mother: Config, father: Config, rng: random.Random) -> Config:
    """Each axis from either parent; the template, and the options that only it has, from the mother."""
    values = {a: getattr(rng.choice((mother, father)), a) for a in AXES}
    theirs = dict(father.options)
    options = tuple((n, rng.choice((v, theirs.get(n, v)))) for n, v in mother.options)
    return replace(mother, options=options, **values)


def _mutate(child: Config, axes: TemplateSpace, rng: random.Random) -> Config:
    """Each axis redrawn with probability 1/n: one of them on average."""
    chance = 1 / len(axes.values)
    point = tuple(
        rng.choice(v) if rng.random() < chance else old
        for (_, v), old in zip(axes.values, axes.point(child), strict=True)
    )
    return axes.config(point)

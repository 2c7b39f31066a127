"""A genetic strategy, which breeds from the fastest configs: tournaments, uniform crossover, mutation, elites.

As in hipBLASLt's TuningDriver, scaled down from its 512 x 30 to what a few minutes of one GPU allow. Offspring that
were pruned, or tried before, are replaced by the nearest kept config that is new, so every trial is of a kept config
and none is repeated; the winners are verified like those of any strategy.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from tritongemm.core.config import AXES, Config
from tritongemm.core.integers import cdiv
from tritongemm.core.space import TemplateSpace
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Search, SearchPlan, Strategy
from tritongemm.search.strategies._candidates import CandidateSet

# configs of a generation, and generations that the default budget pays for
POPULATION, GENERATIONS = 32, 8
# random configs of which the fastest becomes a parent
TOURNAMENT_CONFIGS = 2
# share of the children with two parents
CROSSOVER_SHARE = 0.9
# share of the population that survives
ELITE_SHARE = 0.1
# generations in a row, each with a smaller gain than this share of the best time, that end the search
PATIENCE_GENERATIONS, LEAST_GAIN = 3, 8e-4
# seed, so that equal trials give equal generations
SEED = 0


class Genetic(Strategy):
    """Generations bred from the fastest; the same trials give the same generations."""

    population = POPULATION
    independent = True

    def most_configs(self, kept: int, budget: int, population: int) -> int:
        """Return the budget, which pays for 8 generations by default."""
        return min(kept, budget or (population or POPULATION) * GENERATIONS)

    def search(self, plan: SearchPlan, budget: int) -> Search:
        """Yield generations; the first is half the best predicted, half random; a budget of 0 tries 8 generations."""
        rng, kept = random.Random(SEED), CandidateSet(plan.expected.configs)
        axes = {a.template: a for a in plan.space.axes}
        budget = self.most_configs(len(kept.order), budget, plan.population)
        size = min(plan.population, budget) or max(1, min(POPULATION, cdiv(budget, 4)))
        first = dict.fromkeys([*kept.seeds(plan.seeds), *kept.pick_varied(size // 2 + 1)][:size])
        unseen = [c for c in kept.order if c not in first]
        batch = [*first, *rng.sample(unseen, min(len(unseen), size - len(first)))]
        tried: set[Config] = set()
        alive: list[Trial] = []
        stale = 0
        while batch and stale < PATIENCE_GENERATIONS:
            before = alive[0].seconds if alive else float("inf")
            tried.update(batch)
            measured = [t for t in (yield batch) if t.status == "ok"]
            elites = alive[: max(1, round(ELITE_SHARE * size))]
            # All that survive may breed once more, so that a weak generation does not lose its parents.
            alive = sorted([*elites, *measured], key=_fitness)[:size] if measured else alive
            stale = 0 if alive and alive[0].seconds < before * (1 - LEAST_GAIN) else stale + 1
            batch = []
            while len(batch) < min(size, budget - len(tried)):
                child = kept.nearest(_breed(alive, kept, axes, rng), tried.union(batch))
                if child is None:
                    break
                batch.append(child)


def _fitness(trial: Trial) -> tuple[float, Config]:
    return trial.seconds, trial.config


def _breed(alive: Sequence[Trial], kept: CandidateSet, axes: dict[str, TemplateSpace], rng: random.Random) -> Config:
    """Return a child of two winners of tournaments; a random config while none is alive."""
    if not alive:
        return rng.choice(kept.order)
    mother, father = (min(rng.choices(alive, k=TOURNAMENT_CONFIGS), key=_fitness).config for _ in range(2))
    child = _cross(mother, father, rng) if rng.random() < CROSSOVER_SHARE else mother
    return _mutate(child, axes[child.template], rng) if child.template in axes else child


def _cross(mother: Config, father: Config, rng: random.Random) -> Config:
    """Return each axis from either parent; the template, and the options that only it has, from the mother."""
    values = {a: getattr(rng.choice((mother, father)), a) for a in AXES}
    theirs = dict(father.options)
    options = tuple((n, rng.choice((v, theirs.get(n, v)))) for n, v in mother.options)
    return replace(mother, options=options, **values)


def _mutate(child: Config, axes: TemplateSpace, rng: random.Random) -> Config:
    """Return each axis redrawn with probability 1/n: one of them on average."""
    chance = 1 / len(axes.values)
    point = tuple(
        rng.choice(v) if rng.random() < chance else old
        for (_, v), old in zip(axes.values, axes.point(child), strict=True)
    )
    return axes.config(point)

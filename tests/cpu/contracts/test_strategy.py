from collections.abc import Callable
from zlib import crc32

import pytest

from tests.support.nouns import Config, Problem, Trial, each, load_target, matrices, space
from tests.support.plugins import each_with_toy
from tritongemm.core.space import Space
from tritongemm.plugins.contracts import SearchPlan, Strategy
from tritongemm.plugins.contracts.searching import Predictions
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune

TOY = "strategy_toy"
GFX942 = load_target("gfx942")
SIZE = Problem(256, 512, 2048, *matrices(layout="TN"))
Outcome = Callable[[Config], Trial]


strategy = each_with_toy(Strategy, TOY)


@pytest.fixture(scope="module")
def entire() -> tuple[Space, Predictions]:
    found = space(SIZE, GFX942, templates=("tile",))
    return found, rank(prune(found, SIZE, GFX942).kept[::14], SIZE, GFX942)


def crashes(config: Config) -> Trial:
    return Trial(config, "crashed")


def noisy(config: Config) -> Trial:
    noise = crc32(config.name.encode())
    seconds = 1e-3 / (config.block_m * config.block_n) * (1 + noise % 100 / 1000)
    return Trial(config, "ok", samples=(seconds,)) if noise % 8 else crashes(config)


def play(strategy: Strategy, plan: SearchPlan, budget: int, outcome: Outcome) -> list[list[Config]]:
    search = strategy.search(plan, budget)
    batches = [next(search)]
    try:
        while True:
            batches.append(search.send([outcome(c) for c in batches[-1]]))
    except StopIteration:
        return batches


@each(("budget", "outcome"), [(1, noisy), (7, crashes), (60, noisy)])
def test_it_tries_kept_configs_once_within_the_budget_and_ends(
    strategy: Strategy, entire: tuple[Space, Predictions], budget: int, outcome: Outcome
) -> None:
    batches = play(strategy, SearchPlan(*entire), budget, outcome)
    tried = [c for batch in batches for c in batch]
    assert all(batches) and 1 <= len(tried) <= strategy.most_configs(len(entire[1]), budget, 0) <= budget
    assert len(set(tried)) == len(tried) and set(tried) <= set(entire[1].configs)


def test_batches_are_equal_in_the_budget_and_seeds_first(strategy: Strategy, entire: tuple[Space, Predictions]) -> None:
    first, second = (play(strategy, SearchPlan(*entire), 30, noisy) for _ in range(2))
    assert first == second
    tried = [c for batch in play(strategy, SearchPlan(*entire), 0, noisy) for c in batch]
    assert 8 <= len(tried) <= strategy.most_configs(len(entire[1]), 0, 0) <= len(entire[1])
    assert len(set(tried)) == len(tried)
    last, foreign = entire[1].configs[-1], Config("no_such_kernel", 64, 64, 64)
    batches = play(strategy, SearchPlan(*entire, seeds=(last, foreign)), 60, noisy)
    assert batches[0][0] == last and all(foreign not in batch for batch in batches)
    only = entire[1][:1]
    assert play(strategy, SearchPlan(entire[0], only), 0, noisy) == [list(only.configs)]

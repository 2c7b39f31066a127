"""A product that may add up in several orders gets the one that loses least at any M."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stores import record, take
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.invariance import Invariance
from tritongemm.tune import order_choice
from tritongemm.tune.options import TuningOptions

NARROW = Problem(1, 1280, 8192, *matrices("bf16", layout="TN"))
ORDERS = tuple(ReductionOrder(8192, run) for run in (8192, 4096, 2048))


@pytest.mark.parametrize(
    ("microseconds", "chosen"),
    [
        ({1: (11, 9, 8), 1024: (10, 9, 9), 4096: (9, 9.5, 13)}, "2x4096"),
        ({1: (11, 6, 6), 1024: (10, 12, 10), 4096: (9, 9, 13)}, "1x8192"),
        ({1: (9.9, 6, 5), 1024: (10, 9, 9), 4096: (10, 10.1, 10.1)}, "4x2048"),
        ({1: (11, 6, None), 1024: (10, 9, 9), 4096: (10, 10, 10)}, "2x4096"),
    ],
)
def test_the_order_whose_least_speed_is_the_greatest_is_chosen(
    microseconds: dict[int, tuple[float | None, ...]],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Race:
        """A run whose sizes take the times of their order, and fail where there is none."""

        def __init__(self, _: Any, __: Any, store: Any, options: TuningOptions, ___: Any) -> None:
            self.store, self.invariance = store, options.invariance

        def tune(self, problems: list[Problem]) -> None:
            for problem in problems:
                assert self.invariance is not None
                time = microseconds.get(problem.m, (8, 8, 8))[ORDERS.index(self.invariance.order(problem))]
                if time is not None:
                    self.store.add_record(record(problem, time * 1e-6, library="torch", library_seconds=1e-5))

    monkeypatch.setattr(order_choice, "TuningRun", Race)
    other = Problem(1, 4096, 4096, *matrices("bf16", layout="TN"))
    invariance = Invariance({NARROW: ORDERS, other: ORDERS[:1]})
    options, watcher = TuningOptions(tmp_path, invariance=invariance), SimpleNamespace(say=print)
    store = SimpleNamespace(record=lambda _: None)
    run: Any = SimpleNamespace(options=options, evaluators=[], pool=None, watcher=watcher, store=store)
    every = [NARROW.at(m) for m in (1, 16, 64, 1024, 4096)] + [other]
    order_choice.choose(run, every, take)
    assert str(invariance.order(NARROW.at(777))) == chosen
    assert invariance.order(other) == ORDERS[0]
    assert f"order {chosen}; least speed at M 1, 16, 64, 1024, 4096: 1x8192 " in capsys.readouterr().out


def test_an_order_is_chosen_by_the_time_of_a_workloads_calls() -> None:
    speeds = {1: (1.0, 1.3), 4096: (1.05, 0.99)}
    results = [[record(NARROW.at(m), 1e-6 * m / own[i]) for m, own in speeds.items()] for i in (0, 1)]
    sizes = [NARROW.at(m) for m in speeds]
    by_order = list(zip(*speeds.values(), strict=True))

    def chosen(*calls: int) -> int:
        rows = [FormatRow(NARROW.at(m), count=count) for m, count in zip((2, 4000), calls, strict=True)]
        return order_choice.choose_order(by_order, order_choice._weights(results, sizes, rows))

    assert [chosen(1, 1), chosen(100_000, 10), chosen(1000, 10)] == [1, 1, 0]


def test_a_run_without_time_for_races_says_what_it_did_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invariance = Invariance({NARROW: ORDERS})
    options = TuningOptions(tmp_path, seconds=79, invariance=invariance)
    store, watcher = SimpleNamespace(record=lambda _: None), SimpleNamespace(say=print)
    run: Any = SimpleNamespace(options=options, watcher=watcher, store=store)
    order_choice.choose(run, [NARROW], take)
    said = capsys.readouterr().out
    assert "order 1x8192, not compared with 2x4096, 4x2048, which takes a --budget of 80s" in said

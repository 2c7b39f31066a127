import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Artifact, Capsys, Config, Defaults, Groups, Machine, Patch, Trial, each, fails, registry
from tests.support.stores import TOOLS, record, take
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.protocol import RaceResult
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.invariance import Invariance
from tritongemm.plugins.contracts import ServerFormat
from tritongemm.report.console import Reporter
from tritongemm.results.tuned_file import TunedFile
from tritongemm.search_spaces import loader as target_files
from tritongemm.tune import order_choice, servers
from tritongemm.tune.layer_tuning import LayerTuning
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.request import SearchScope, SizeSource, TuneRequest
from tritongemm.tune.task import Task, TaskState, make_record
from tritongemm.workloads.m_spans import MSpan

LINE = ["BUILDING", "SEARCHING", "BUILDING", "SEARCHING", "WAITING", "RACING", "DONE"]


def test_a_size_goes_down_the_line_or_fails_anywhere_and_its_first_reason_counts() -> None:
    task = Task(Problem(1, 2, 3))
    for name in LINE:
        task.move_to(TaskState[name])
    assert task.finished
    task = Task(Problem(1, 2, 3), TaskState.RACING)
    task.fail("its operands do not fit")
    task.fail("and more")
    task.move_to(TaskState.FAILED)
    assert task.finished and task.failure == "its operands do not fit"
    task, config = Task(Problem(1, 2, 3)), Config("tile", 16, 16, 16)
    task.add_trial(Trial(config, "ok", samples=(2e-6,)))
    task.add_trial(Trial(Config("tile", 16, 16, 32), "wrong", samples=(1e-6,)))
    assert task.best.seconds == 2e-6


@each(("state", "wrong"), [("QUEUED", "RACING"), ("BUILDING", "DONE"), ("DONE", "BUILDING")])
def test_it_does_not_jump(state: str, wrong: str) -> None:
    task = Task(Problem(1, 2, 3), TaskState[state])
    fails(ValueError, f"1x2x3_fp16_TT can't go from {TaskState[state].value} to", task.move_to, TaskState[wrong])
    assert task.state is TaskState[state]


NAME = "E=8,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
TARGET = target_files.load_target("sm90", compute_units=132)
TILES = [Config("grouped_tile", 16, n, 128, 1, num_warps=4, num_stages=s) for n in (32, 64, 128) for s in (2, 3, 4, 5)]
MACHINE = {**TOOLS, "device": "NVIDIA H200"}


def seconds_of(config: Config, problem: Problem) -> float:
    """Wide tiles for gate and up, narrow ones for down, and 64 columns nearly as fast at both."""
    best = 128 if problem.n == 512 else 32
    return 1e-6 * (10 + 3 * (config.block_n != best) + 6 * (config.block_n == 160 - best) + config.num_stages / 10)


class ScriptedEvaluator(FakeEvaluator):
    """A device on which each product has another fastest config."""

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        configs = [a.config for a in artifacts]
        samples = {c.name: (seconds_of(c, problem),) * 10 for c in configs}
        trials = tuple(Trial(c, "ok", "", samples[c.name], "sundial", "final", 0.0, 0.1) for c in configs)
        return RaceResult(trials, samples, True)


@pytest.mark.parametrize("backend", ["triton", "vllm"])
def test_the_configs_of_both_products_race_at_each(backend: str, tmp_path: Path) -> None:
    """Of template `grouped_tile`, or of the server's own kernel, which has the same tiles."""
    tiles = [replace(config, backend=backend) for config in TILES]
    server = registry.get(ServerFormat, "vllm_moe_json")
    rows = server.list_sizes(256, 1024, Defaults(family="a8w8_blockscale", groups=Groups(8)), 2, (16,))
    evaluator = ScriptedEvaluator("sm90")
    evaluator.target = TARGET
    source = SizeSource(defaults=Defaults(family="a8w8_blockscale", groups=Groups(8)))
    request = TuneRequest(source, search=SearchScope(server="vllm"))
    limits = servers.limits(request, Machine(TARGET, "nvidia", (0,), "H200", ""), [backend])
    assert {config.backend for config in limits.first} == {backend}
    options = TuningOptions(Path("unused"), backends=(backend,), toolchain=MACHINE, limits=limits)
    reported = TunedFile.find(tmp_path / NAME)
    assert reported is not None
    with take(reported.results, target="sm90", toolchain=MACHINE) as store:
        for problem in (row.problem for row in rows):
            fastest = sorted(tiles, key=lambda c: seconds_of(c, problem))
            screens = [Trial(c, "ok", samples=(seconds_of(c, problem),), timer="sundial") for c in tiles]
            result = evaluator.race(problem, [Artifact(c, "") for c in fastest[:2]], "")
            record = make_record(problem, result, TARGET, options, frozenset(), "by eye")
            store.add_trials(problem, [*screens, *result.trials], record)
        pool = SimpleNamespace(stream=lambda jobs: iter([Artifact(job.config, job.digest) for job in jobs]))
        run: Any = SimpleNamespace(
            store=store, options=options, evaluators=[evaluator], pool=pool, watcher=Reporter(), ends=inf
        )
        LayerTuning(run, server.can_express).tune(rows)
        raced = [{t.config for (_, stage), t in store.trials(row.problem).items() if stage == "final"} for row in rows]
        assert raced[0] == raced[1] and raced[0] >= {*limits.first} and len(raced[0]) > len(limits.first) + 4
        found = reported.write(store, [row.problem for row in rows], rows)
    assert found.count == 2 and not found.omitted
    table = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    sums = {c: sum(seconds_of(c, row.problem) for row in rows) for c in raced[0]}
    best = min(sums, key=sums.__getitem__)
    assert (table["16"]["BLOCK_SIZE_N"], table["16"]["num_stages"]) == (best.block_n, best.num_stages)
    assert replace(best, num_stages=2) in tiles or best in limits.first


NARROW = Problem(1, 1280, 8192, *matrices("bf16", layout="TN"))
ORDERS = tuple(ReductionOrder(8192, run) for run in (8192, 4096, 2048))
HERE = [SimpleNamespace(target=TARGET)]


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
    microseconds: dict[int, tuple[float | None, ...]], chosen: str, tmp_path: Path, monkeypatch: Patch, capsys: Capsys
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
    store = SimpleNamespace(record=lambda _: None, beside=lambda _: [])
    run: Any = SimpleNamespace(options=options, evaluators=HERE, pool=None, watcher=watcher, store=store)
    order_choice.choose(run, [NARROW.at(m) for m in (1, 16, 64, 1024, 4096)] + [other], take)
    assert str(invariance.order(NARROW.at(777))) == chosen and invariance.order(other) == ORDERS[0]
    assert f"order {chosen}; least speed at M 1, 16, 64, 1024, 4096: 1x8192 " in capsys.readouterr().out


def test_orders_are_compared_where_one_is_expected_to_lose_most(tmp_path: Path, monkeypatch: Patch) -> None:
    slow = {(144, 4096): 1.3, (192, 8192): 1.2, (320, 4096): 1.1, (704, 2048): 1.02}
    monkeypatch.setattr(
        order_choice, "_expected", lambda _, asked: {(p, o): slow.get((p.m, o.run), 1.0) for p, o in asked}
    )
    run: Any = SimpleNamespace(options=TuningOptions(tmp_path))
    span = MSpan(NARROW, 1, 2048)
    every = [span.at(m) for m in (*span.ladder(), *span.between())]
    (sizes,) = order_choice._compared(run, list(dict.fromkeys(every)), {NARROW: ORDERS}).values()
    assert {p.m for p in sizes} == {1, 4, 24, 96, 448, 2048} | {144, 320}


def test_an_order_is_chosen_by_the_time_of_a_workloads_calls() -> None:
    speeds = {1: (1.0, 1.3), 4096: (1.05, 0.99)}
    results = [[record(NARROW.at(m), 1e-6 * m / own[i]) for m, own in speeds.items()] for i in (0, 1)]
    sizes = [NARROW.at(m) for m in speeds]
    by_order = list(zip(*speeds.values(), strict=True))

    def chosen(*calls: int) -> int:
        rows = [FormatRow(NARROW.at(m), count=count) for m, count in zip((2, 4000), calls, strict=True)]
        return order_choice.choose_order(by_order, order_choice._weights(results, sizes, rows))

    assert [chosen(1, 1), chosen(100_000, 10), chosen(1000, 10)] == [1, 1, 0]
    assert [order_choice.choose_order([(1.07, 1.3), (1.03, 1.5)], (1, 1), every) for every in (True, False)] == [1, 0]


def test_a_run_without_time_for_races_says_what_it_did_not_compare(tmp_path: Path, capsys: Capsys) -> None:
    options = TuningOptions(tmp_path, seconds=79, invariance=Invariance({NARROW: ORDERS}))
    store, watcher = SimpleNamespace(record=lambda _: None, beside=lambda _: []), SimpleNamespace(say=print)
    run: Any = SimpleNamespace(options=options, evaluators=HERE, watcher=watcher, store=store)
    order_choice.choose(run, [NARROW], take)
    assert "order 1x8192, not compared with 2x4096, 4x2048, which takes a --budget of 80s" in capsys.readouterr().out

"""Tables over M of a library whose times are known: at every M the rows do nearly as well as tuning it would."""

import functools
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import reports
from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import BASELINE_ENTRY, Artifact, Config, Problem, RaceResult, SearchLimits, Trial, matrices
from tests.support.stores import TOOLS, take
from tests.support.tables import apart
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.measure.invariance import Invariance
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.search import planner
from tritongemm.search_spaces import loader as target_files
from tritongemm.tune.expectation import Expectation
from tritongemm.tune.m_table import MeasuredM, MTable, split_at_steps
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.table_tuning import TableTuning
from tritongemm.tune.task import make_record
from tritongemm.workloads.m_spans import MSpan

TARGET = target_files.load_target("sm90", compute_units=132)
HIGH = 1024
SPAN = MSpan(Problem(1, 2112, 7168, *matrices("bf16", layout="TN")), 1, HIGH)
TILES = [
    Config("heuristic", rows, columns, 64, 1, 1, 0, 0, (("algo", 66),), "blaslt")
    for columns in (64, 96, 128, 192)
    for rows in range(16, 264, 8)
]
ONE = (
    ("num_stages", (4,)),
    ("group_m", (4,)),
    ("epilogue_parts", (1,)),
    ("share", (0,)),
    ("ahead", (0,)),
    ("split_k", (1,)),
)
LIMITS = SearchLimits(1, ("ws_tma",), ONE)  # few kernels fit between the rows
OPTIONS = TuningOptions(Path("unused"), backends=("triton", "blaslt"), toolchain=TOOLS, limits=LIMITS)


def seconds_of(config: Config, m: int) -> float:
    """As a library's persistent kernels take it: full waves of tiles, and the sides of each to read."""
    waves = -(-(-(-m // config.block_m) * -(-SPAN.problem.n // config.block_n)) // TARGET.compute_units)
    return 6e-6 + 1e-9 * waves * (config.block_m * config.block_n + 90 * (config.block_m + config.block_n)) / 2


def choice_of_the_library(m: int) -> Config:
    """A guess that looks at the number of tiles alone."""
    return min(TILES, key=lambda c: (-(-m // c.block_m) * c.block_m / m * (1 + 20 / c.block_m), c))


class ScriptedEvaluator(FakeEvaluator):
    """A device with such a library, which offers at an M the tiles that waste least of it."""

    def __init__(self, wrong_at: Set[int] = frozenset()) -> None:
        super().__init__("sm90")
        self.wrong_at = wrong_at
        self.target = TARGET
        self.races: list[int] = []

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        self.races.append(problem.m)
        configs = [a.config for a in artifacts]
        samples = {c.name: (seconds_of(c, problem.m),) * 10 for c in configs}
        samples[BASELINE_ENTRY] = (seconds_of(choice_of_the_library(problem.m), problem.m),) * 10
        trials = tuple(Trial(c, "ok", "", samples[c.name], "sundial", "final", 0.0, 0.1) for c in configs)
        if problem.m in self.wrong_at:
            del samples[BASELINE_ENTRY]
        return RaceResult(trials, samples, True, library_wrong="error 1" if problem.m in self.wrong_at else "")

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        waste = lambda c: -(-problem.m // c.block_m) * c.block_m + -(-problem.n // c.block_n) * c.block_n
        return sorted(TILES, key=waste)[:limit]


class ComparingEvaluator(ScriptedEvaluator):
    """Such a device of which tiles of 192 columns add up in another order."""

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        result = super().race(problem, artifacts, baseline, brief)
        trials = (replace(t, row_bits="bb" if t.config.block_n == 192 else "aa") for t in result.trials)
        return replace(result, trials=tuple(trials))


def searched(path: Path, evaluator: ScriptedEvaluator, options: TuningOptions = OPTIONS) -> Store:
    """A store in which the sizes that a table begins with are tuned."""
    store = take(path, target="sm90")
    for m in SPAN.searched():
        problem = SPAN.at(m)
        if store.record(problem) is None:
            offered = evaluator.list_algorithms(problem, "blaslt", 48)
            result = options.compare(problem, evaluator.race(problem, [Artifact(c, "") for c in offered], "torch"))
            record = make_record(problem, result, TARGET, options, frozenset({"blaslt"}), "by eye")
            screens = [Trial(c, "ok", samples=(seconds_of(c, m),), timer="sundial") for c in offered]
            store.add_trials(problem, [*screens, *result.trials], record)
    evaluator.races.clear()
    return store


def tabled(store: Store, evaluator: ScriptedEvaluator, options: TuningOptions = OPTIONS, ends: float = inf) -> MTable:
    """The table of the span, made by a run whose seconds are spent at a moment."""
    pool = SimpleNamespace(stream=lambda _: iter(()), jobs=1)  # no kernel compiles
    run: Any = SimpleNamespace(
        store=store, options=options, evaluators=[evaluator], pool=pool, watcher=Reporter(), ends=ends
    )
    return TableTuning(run).tune([SPAN])[SPAN]


@pytest.fixture(scope="module", autouse=True)
def ranked_once() -> Iterator[None]:
    """Tables of one span rank the same spaces, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "rank_space", functools.cache(planner.rank_space))
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.yaml"


def test_rows_serve_every_m_nearly_as_well_as_its_own_tuning(path: Path) -> None:
    evaluator = ScriptedEvaluator()
    with searched(path, evaluator) as store:
        table = tabled(store, evaluator)
        regrets = []
        for m in range(1, HIGH + 1):
            row = table.row_of(m)
            assert row is not None, m
            served = choice_of_the_library(m) if row.record.winner == "torch" else row.record.config
            regrets.append(seconds_of(served, m) / min(seconds_of(c, m) for c in TILES) - 1)
        assert fmean(regrets) < 0.002 and sorted(regrets)[int(0.9 * HIGH)] < 0.005 and max(regrets) < 0.03
        records = table.records()
        assert [r.m_from for r in records] == [1, *(r.problem.m + 1 for r in records[:-1])]
        assert records[-1].problem.m == HIGH and len(records) < 80
        held_out = {int(m) for r in records for m in r.held_out}
        assert held_out and held_out.isdisjoint(r.problem.m for r in records)
        assert all(store.record(r.problem) == r for r in records)


def test_a_kernel_whose_tiles_fit_an_m_is_expected_to_be_the_fastest_there() -> None:
    expectation = Expectation(SPAN, TARGET)
    searched = Config("tma", 64, 64, 128, 4, 1, 4, 7, (("ahead", 1),))
    fitting = Config("ws_tma_swapped", 48, 64, 128, 4, 1, 4, 8, (("ahead", 2), ("swap_ab", 1)))
    for m in (64, 256):
        expectation.note(m, {searched: 15e-6})
    expectation.offer([fitting])
    assert [expectation.kernels(m, [256, 64])[0] for m in (132, 256)] == [fitting, searched]


def test_seconds_that_the_search_spent_are_not_spent_again(path: Path) -> None:
    """The M that were searched are the rows, and are compared at M held out once."""
    evaluator = ScriptedEvaluator()
    with searched(path, evaluator) as store:
        table = tabled(store, evaluator, ends=0.0)
        assert sorted(table.rows) == sorted(SPAN.searched()) and set(evaluator.races) == set(table.held_out)


def test_a_library_that_is_wrong_between_the_rows_serves_none_of_those_m(path: Path) -> None:
    """It is compared at held-out M, each of which becomes a row where the library would have served it."""
    evaluator = ScriptedEvaluator(wrong_at=set(range(1, HIGH)) - {*SPAN.ladder(), *SPAN.searched()})
    with searched(path, evaluator) as store:
        table = tabled(store, evaluator)
        compared = evaluator.wrong_at & set(evaluator.races)
        served = {m: row.record.winner for m in compared if (row := table.row_of(m))}
        assert len(served) > 8 and "torch" not in served.values()
        assert "torch" in {row.record.winner for row in table.rows.values()} and table.records()


def test_a_run_that_goes_on_measures_nothing_twice(path: Path) -> None:
    evaluator = ScriptedEvaluator()
    with searched(path, evaluator) as store:
        first = tabled(store, evaluator).records()
        assert len(set(evaluator.races)) > 80  # twice at M that begin a part of a split range, with other candidates
        store.merge([SPAN.at(m) for m in SPAN.ladder()])
    with searched(path, evaluator) as store:
        assert tabled(store, evaluator).records() == first and not evaluator.races


def test_all_rows_of_an_invariant_table_have_the_bits_of_most(path: Path) -> None:
    order = ReductionOrder(SPAN.problem.k, SPAN.problem.k)
    options = replace(OPTIONS, invariance=Invariance({SPAN.at(1): [order]}, with_libraries=True))
    evaluator = ComparingEvaluator()
    with searched(path, evaluator, options) as store:
        table = tabled(store, evaluator, options)
    records = table.records()
    assert len(records) > 20 and {(r.order, r.row_bits, r.winner) for r in records} == {("1x7168", "aa", "blaslt")}
    assert all(r.config.block_n != 192 and r.library_seconds for r in records)
    assert len([m for m in table.held_out if table.held_out[m].record.row_bits == "aa"]) > 4


def test_a_product_without_results_has_no_table(path: Path) -> None:
    evaluator = ScriptedEvaluator()
    with take(path, target="sm90") as store:
        assert tabled(store, evaluator).rows == {} and not evaluator.races


@apart(
    (1.02, 1.02, 0.97, "torch"),
    (1.2, 1.2, 0.97, "torch"),
    (1.2, 1.2, 1.18, "blaslt"),
    (1.0, 1.0, 1.0, "blaslt"),
    (1.0, 1.0, 0.995, "torch"),
    (1.2, 0.98, 1.1, "torch"),
    (1.9, 0.99, 1.0, "blaslt"),  # a step of the library's time is no gain that is lost
)
def test_a_row_serves_a_range_where_held_out_m_leave_some_of_its_gain(
    gain: float, start: float, share: float, winner: str, /, path: Path
) -> None:
    """The library serves where it was faster there or at the least M, or the gain is what was lost there on average."""
    with searched(path, ScriptedEvaluator()) as store:
        record = store.record(SPAN.at(SPAN.searched()[1]))
    assert record is not None
    record = replace(record, winner="blaslt", seconds=1e-5, library_seconds=1e-5 * gain)
    m = record.problem.m
    between, least = (
        MeasuredM(replace(record, problem=SPAN.at(at), library_seconds=1e-5 * part), {record.config: 1e-5})
        for at, part in ((m - 1, share), (1, start))
    )
    (served,) = MTable(1, {m: MeasuredM(record, {record.config: 1e-5})}, {m - 1: between}, {1: least}).records()
    assert served.winner == winner and served.held_out[str(m - 1)][1] == (share if winner == "blaslt" else 1.0)


def test_a_row_whose_gain_is_lost_in_its_range_serves_its_own_m(path: Path) -> None:
    with searched(path, ScriptedEvaluator()) as store:
        record = store.record(SPAN.at(SPAN.searched()[1]))
    assert record is not None
    m, own = record.problem.m, replace(record, winner="blaslt", seconds=1e-5, library_seconds=1.1e-5, tie=False)
    lost = MeasuredM(replace(own, problem=SPAN.at(m - 2), library_seconds=9e-6), {record.config: 1e-5})
    for tie, wanted in ((False, [(1, m - 1, "torch"), (m, m, "blaslt")]), (True, [(1, m, "torch")])):
        found = MTable(1, {m: MeasuredM(replace(own, tie=tie), {record.config: 1e-5})}, {m - 2: lost}).records()
        assert [(r.m_from, r.problem.m, r.winner) for r in found] == wanted
        assert [[*r.held_out] for r in found] == [[str(m - 2)], []][: len(wanted)]


def test_the_library_serves_up_to_a_step_of_its_time_inside_a_range() -> None:
    """Its tiles fit M of 512 as well as 504, where it takes less time than a row raced at 528 does at any of its M."""
    of = {504: (1.5e-4, 1.54e-4, 481), 528: (1.71e-4, 1.76e-4, 505), 576: (1.74e-4, 1.92e-4, 529)}
    rows = [
        reports.result(
            reports.problem(m), ours, library_seconds=theirs, m_from=start, held_out={str(m - 20): [0.0, 1.0]}
        )
        for m, (ours, theirs, start) in of.items()
    ]
    found = [(r.m_from, r.problem.m, r.winner == r.library, sorted(r.held_out)) for r in split_at_steps(rows)]
    assert found == [
        (481, 504, False, ["484"]),
        (505, 512, True, []),
        (513, 528, False, []),
        (529, 576, False, ["556"]),
    ]
    assert [r.problem.m for r in split_at_steps([rows[0], replace(rows[1], order="1xK")])] == [504, 528]

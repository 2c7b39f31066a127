"""How the line runs: what waits for what, when it stops, and what a fault in it costs."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.racing import CODE, SIZE, Drop, race
from tests.support.stores import record, take
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import OutputError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.plugins.contracts import Search, SearchPlan
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space
from tritongemm.search.strategies.exhaustive import Exhaustive
from tritongemm.tuning.run import TuningRun
from tritongemm.workers.work_queue import WorkQueue


def announced(enough: int) -> tuple[FakeEvaluator, threading.Event]:
    """An evaluator, and what is set when it has screened so many of Triton's kernels."""
    reached = threading.Event()
    screened: list[Trial] = []

    def count(trial: Trial) -> None:
        screened.extend([trial] * (trial.config.backend == "triton"))
        if len(screened) >= enough:
            reached.set()

    return FakeEvaluator(on_trial=count), reached


def test_the_search_goes_on_while_slow_backends_compile(drop: Drop, tmp_path: Path) -> None:
    """Two batches of Triton's are screened before the first instance is built; the final waits for all of them."""
    drop("toycode", CODE)
    judge, reached = announced(enough=2)
    waited: list[bool] = []
    failures, store, _ = race(
        tmp_path,
        ("toycode", "triton"),
        judge,
        lambda job: waited.append(reached.wait(20)),
        strategy="guided",
        budget=2,
    )
    assert failures == {} and waited == [True, True], "one of the three is refused before it is compiled"
    assert {c.backend for c in judge.raced} == {"toycode", "triton"}
    record = store.record(SIZE)
    assert record and record.winner == "toycode"


def out_of_time(folder: Path) -> str:
    """A race without the backend whose compiler does not end in time, and what was said of it."""
    judge, over = FakeEvaluator(), threading.Event()
    failures, _, said = race(
        folder,
        ("toycode", "triton"),
        judge,
        lambda job: over.wait(20) and None,
        strategy="guided",
        budget=2,
        seconds=0.3,
    )
    over.set()
    assert failures == {} and {c.backend for c in judge.raced} == {"triton"}
    return said


def test_seconds_of_a_run(drop: Drop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are over no strategy is asked, no compile begins, and what there is is raced, without the rest."""
    drop("toycode", CODE)
    race(tmp_path / "before", ("triton",), strategy="guided", budget=2)  # its kernels are in the cache now
    said = out_of_time(tmp_path)
    assert "toycode does not race: the budget was spent before 2 of its kernels were compiled" in said
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    failures, _, _ = race(tmp_path / "none", ("triton",), seconds=1e-9)
    assert failures == {SIZE: "no candidate passed: triton brought none within 1e-09 s"}


def test_what_a_resumed_run_has_not_built_does_not_race(drop: Drop, tmp_path: Path) -> None:
    """The journal knows it for the fastest, but its library is gone and there is no time to make it again."""
    drop("toycode", CODE)
    race(tmp_path / "before", ("triton",), strategy="guided", budget=2)  # its kernels are in the cache now
    fastest = Trial(Config("toy", 1, 1, 1, backend="toycode"), "ok", samples=(1e-9,), timer="sundial")
    with Store.open(tmp_path / "out.yaml", "gfx942", {}, {}) as store:
        store.add_trials(SIZE, [fastest])
    out_of_time(tmp_path)


def test_a_resumed_run_asks_for_what_the_first_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later problems prefer kernels that earlier ones compile, whether these are tuned or have a record by now."""
    large, small = Problem(64, 2048, 512), Problem(64, 1024, 512)
    other = Problem(64, 4096, 512, "bf16", "bf16", "bf16")
    search, asked = Exhaustive.search, dict[Problem, list[Config]]()

    def watched(strategy: Exhaustive, plan: SearchPlan, budget: int) -> Search:
        for batch in search(strategy, plan, budget):
            asked[plan.space.problem] = batch
            yield batch

    monkeypatch.setattr(Exhaustive, "search", watched)

    def run(store: Store) -> None:
        plan = TuningOptions(tmp_path, "exhaustive", budget=100, stop="generate")
        with closing(BuildPool(ArtifactCache(tmp_path / "cache"), jobs=1)) as compiler:
            TuningRun([FakeEvaluator()], compiler, store, plan, Reporter()).tune([small, other, large])

    with take(tmp_path / "out.yaml") as store:
        run(store)
        first = dict(asked)
        asked.clear()
        store.add_trials(large, [Trial(c, "ok", samples=(1e-6,)) for c in first[large]])
        store.add_record(record(large))
        run(store)
    assert asked == {small: first[small], other: first[other]}
    target = FakeEvaluator().target
    whole = space(small, target)
    (alone,) = search(Exhaustive(), SearchPlan(whole, rank(prune(whole, small, target).kept, small, target)), 100)
    assert first[small] != alone and {c.kernel_name for c in first[large]} & {c.kernel_name for c in first[small]}


def test_a_lane_that_ended_takes_no_more() -> None:
    """A full disk is told at once, not after the other thousand compiles."""

    def work(things: list[int]) -> None:
        raise OutputError("disk full")

    lane = WorkQueue(work)
    lane.put(1)
    lane._thread.join(10)
    with pytest.raises(OutputError, match="disk full"):
        lane.put(2)
    with pytest.raises(OutputError, match="disk full"):
        lane.close()


def test_a_lane_does_last_what_can_wait() -> None:
    """Races are held while nothing waits to be screened; nobody but the end waits for them."""
    begun, go, done = threading.Event(), threading.Event(), list[list[int]]()

    def work(things: list[int]) -> None:
        begun.set()
        go.wait(10)
        done.append(things)

    lane = WorkQueue(work)
    lane.put(0)
    begun.wait(10)  # the rest is queued while it works
    lane.put(10, later=True)
    lane.put(11, later=True)
    lane.put(1)
    lane.put(2)
    threading.Timer(0.1, go.set).start()
    lane.wait()
    assert done[:2] == [[0], [1, 2]]
    lane.close()
    assert done == [[0], [1, 2], [10], [11]]


def test_what_ends_while_it_is_asked_for_is_not_lost() -> None:
    """A slow compile may end between any two looks at it."""

    class Ending(Future[Artifact]):
        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 1

    config, future, taken = Config("toy", 1, 1, 1, backend="toycode"), Ending(), list[Any]()
    future.set_result(Artifact(config, "digest"))
    watcher = SimpleNamespace(step=lambda *_: None)
    line: Any = TuningRun([], SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), watcher)  # type: ignore[arg-type]
    task: Any = SimpleNamespace(slow=[(config, future)], failure="", judge=None)
    line._lanes[id(None)] = SimpleNamespace(put=lambda item, later: taken.append(item))
    for _ in range(2):
        line._take_late(task)
    ((whose, look),) = taken
    assert whose is task and [b.config for b in look.keywords["builds"]] == [config] and task.slow == []

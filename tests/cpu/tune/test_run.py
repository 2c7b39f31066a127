import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import raising
from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import Config, OutputError, Patch, Problem, RaceResult, SearchLimits, Trial, matrices, space
from tests.support.racing import CODE, SIZE, Drop, pool_and_store, race
from tests.support.stores import record, take
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BackgroundBuilds, BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.plugins.contracts import Search, SearchPlan
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.search.cost_model.model import rank
from tritongemm.search.pruning.prune import prune
from tritongemm.search.strategies.exhaustive import Exhaustive
from tritongemm.tune import final_race
from tritongemm.tune import run as run_module
from tritongemm.tune.device_queue import CompileQueue, DeviceQueue
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun
from tritongemm.tune.search_processes import PlannedSearch, Planner, SearchJob
from tritongemm.tune.task import Task
from tritongemm.tune.threads import ScreenWork, Work


def announced(enough: int) -> tuple[FakeEvaluator, threading.Event]:
    """An evaluator, and an event that is set when it has screened a number of Triton's kernels."""
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
    evaluator, reached = announced(enough=2)
    waited: list[bool] = []
    failures, store, _ = race(
        tmp_path,
        ("toycode", "triton"),
        evaluator,
        lambda job: waited.append(reached.wait(20)),
        strategy="guided",
        budget=2,
    )
    assert failures == {} and waited == [True, True], "one of the three is refused before it is compiled"
    assert {c.backend for c in evaluator.raced} == {"toycode", "triton"}
    record = store.record(SIZE)
    assert record and record.winner == "toycode"


def out_of_time(folder: Path) -> str:
    """A race without the backend whose compiler does not end in time, and what was said of it."""
    evaluator, over = FakeEvaluator(), threading.Event()

    def compile_slowly(job: CompileJob) -> None:
        over.wait(20)

    failures, _, said = race(
        folder, ("toycode", "triton"), evaluator, compile_slowly, strategy="guided", budget=2, seconds=1.0
    )
    over.set()
    assert failures == {} and {c.backend for c in evaluator.raced} == {"triton"}
    return said


def test_seconds_of_a_run(drop: Drop, tmp_path: Path, monkeypatch: Patch) -> None:
    """Once they are over no strategy is asked, no compile begins, and what there is is raced, without the rest."""
    drop("toycode", CODE)
    race(tmp_path / "before", ("triton",), strategy="guided", budget=2)  # what planning remembers is there now
    assert "toycode does not race: the budget was spent before 2 of its kernels were compiled" in out_of_time(tmp_path)
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    failures, _, _ = race(tmp_path / "none", ("triton",), seconds=1e-9)
    assert failures == {SIZE: "no candidate passed: triton brought none within 1e-09 s"}
    monkeypatch.setattr(FakeEvaluator, "list_algorithms", lambda *_: [Config("heuristic", 8, 8, 8, backend="blaslt")])
    failures, _, said = race(tmp_path / "library", ("blaslt", "triton"), seconds=1e-9)
    assert not failures and "the 1e-09 s of --budget were spent before a kernel of it was compiled, so" in said


def test_what_a_resumed_run_has_not_built_does_not_race(drop: Drop, tmp_path: Path) -> None:
    """The journal knows it for the fastest, but its library is gone and there is no time to make it again."""
    drop("toycode", CODE)
    race(tmp_path / "before", ("triton",), strategy="guided", budget=2)  # what planning remembers is there now
    fastest = Trial(Config("toy", 1, 1, 1, backend="toycode"), "ok", samples=(1e-9,), timer="sundial")
    with Store.open(tmp_path / "out.yaml", "gfx942", {}, {}) as store:
        store.add_trials(SIZE, [fastest])
    out_of_time(tmp_path)


def test_a_resumed_run_asks_for_what_the_first_did(tmp_path: Path, monkeypatch: Patch) -> None:
    """Later problems prefer kernels that earlier ones compile, whether these are tuned or have a record by now."""
    large, small = Problem(64, 2048, 512), Problem(64, 1024, 512)
    other = Problem(64, 4096, 512, *matrices("bf16"))
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
    entire = space(small, target)
    (alone,) = search(Exhaustive(), SearchPlan(entire, rank(prune(entire, small, target).kept, small, target)), 100)
    assert first[small] != alone and {c.kernel_name for c in first[large]} & {c.kernel_name for c in first[small]}


@pytest.mark.parametrize("strategy", ["exhaustive", "guided", "genetic"])
def test_a_size_that_no_template_computes_does_not_end_the_run(tmp_path: Path, strategy: str) -> None:
    """Other backends may have kernels for it."""
    batch, one = Problem(16, 64, 128, batch=2), Problem(16, 64, 128)
    limits = SearchLimits(templates=("stream_k",))  # which computes no batches
    options = TuningOptions(tmp_path, strategy, budget=2, library="", limits=limits)
    with pool_and_store(tmp_path) as (pool, store):
        failures = TuningRun([FakeEvaluator()], pool, store, options, Reporter()).tune([batch, one])
        assert list(failures) == [batch] and "triton brought none" in failures[batch] and store.record(one)


def test_a_full_disk_is_reported_at_once(tmp_path: Path, monkeypatch: Patch) -> None:
    """Not after the other thousand compiles; what the thread of a device meets ends the run as well."""
    for owner, name in ((Store, "add_trials"), (FakeEvaluator, "screen")):
        with monkeypatch.context() as patch, pytest.raises(OutputError, match="disk full"):
            patch.setattr(owner, name, raising(OutputError("disk full")))
            race(tmp_path / name, ("triton",))


def test_a_slow_compile_that_has_ended_already_is_not_lost(drop: Drop, tmp_path: Path, monkeypatch: Patch) -> None:
    """It may end before another thread waits for it."""
    drop("toycode", CODE)
    ended: list[CompileJob] = []

    def begin(self: BackgroundBuilds, job: CompileJob) -> Future[Artifact]:
        ended.append(job)
        future: Future[Artifact] = Future()
        future.set_result(self._compiler.build(job))
        return future

    monkeypatch.setattr(BackgroundBuilds, "begin", begin)
    failures, store, _ = race(tmp_path, ("toycode",))
    assert failures == {} and ended
    record = store.record(SIZE)
    assert record and record.winner == "toycode"


def test_what_may_pass_is_tried_again_by_the_next_run(drop: Drop, tmp_path: Path) -> None:
    """A compile, a screen or the final race: no journal keeps it."""
    again = 'return Artifact(job.config, job.digest, status="compile_failed", try_again=True), b"", ""'
    imported = "from tritongemm.core.artifact import Artifact\n"
    drop("toycode", imported + CODE.replace('raise InputError("three is truncated")', again))
    passing = [Config("toy", n, n, n, backend="toycode") for n in (1, 3)]

    class Device(FakeEvaluator):
        def race(self, *given: Any, **more: Any) -> RaceResult:
            result = super().race(*given, **more)
            lost = [Trial(c, "crashed", "killed", stage="final", try_again=True) for c in passing]
            return replace(result, trials=(*result.trials, *lost))

        def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
            for trial in super().screen(problem, artifacts, best_s):
                killed = trial.config in passing
                yield replace(trial, status="crashed", samples=(), try_again=True) if killed else trial

    failures, store, _ = race(tmp_path, ("triton", "toycode"), Device())
    assert failures == {}
    kept = {config for config, _ in store.trials(SIZE)}
    assert kept and not kept & {c.name for c in passing}
    text = (tmp_path / "out.yaml.journal").read_text()
    assert "toycode" in text and not any(c.name in text for c in passing)


def test_devices_draw_the_next_size_when_they_are_free(tmp_path: Path, monkeypatch: Patch) -> None:
    """A size's candidates are all timed by one device; no device waits while another has sizes left.

    A search's effort is that on one of the devices with its share of the cores: more devices do not make it larger.
    """
    both = threading.Barrier(2, timeout=60)
    seen: dict[Problem, set[int]] = {}

    class Device(FakeEvaluator):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.first = number, True

        def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
            if self.first:
                self.first = False
                both.wait()  # neither goes on before the other has a size
            seen.setdefault(problem, set()).add(self.number)
            return super().screen(problem, artifacts, best_s)

    problems, asked = [Problem(16, 16, k) for k in (32, 64, 96, 128)], list[SearchJob]()

    def plans(planner: Planner, jobs: Sequence[SearchJob]) -> Generator[PlannedSearch, None, None]:
        asked.extend(jobs)
        yield from (job.planned_here(job.plan()) for job in jobs)

    monkeypatch.setattr(Planner, "plan", plans)
    with pool_and_store(tmp_path) as (pool, store):
        options = TuningOptions(tmp_path, "guided", budget=2, library="")
        failures = TuningRun([Device(0), Device(1)], pool, store, options, Reporter()).tune(problems)
        assert failures == {} and all(store.record(p) for p in problems)
    assert all(len(devices) == 1 for devices in seen.values()) and set.union(*seen.values()) == {0, 1}
    assert {job.problems_per_core for job in asked} == {4 / (pool.jobs / 2)}


def test_of_each_of_many_sizes_per_core_fewer_candidates_race_briefly_if_no_library_does(tmp_path: Path) -> None:
    raced: set[tuple[int, bool]] = set()

    class Device(FakeEvaluator):
        def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> Any:
            raced.add((len(artifacts), brief))
            return super().race(problem, artifacts, baseline, brief)

    for count, library, is_brief, asked in (
        (1, "", False, 12),
        (8, "", True, 12),
        (8, "torch", False, 12),
        (8, "", True, 9),
    ):
        raced.clear()
        with pool_and_store(tmp_path / f"{count}{library}{asked}") as (pool, store):
            options = TuningOptions(tmp_path, budget=16, library=library, finalists=asked)
            problems = [Problem(16, 16, 32 * k) for k in range(1, count + 1)]
            assert TuningRun([Device()], pool, store, options, Reporter()).tune(problems) == {}
        assert {brief for _, brief in raced} == {is_brief}
        assert (max(most for most, _ in raced) <= final_race.FINALISTS_OF_CROWD) == (count == 8 and asked == 12)


def test_a_size_goes_on_while_others_are_planned(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its second batch is screened before there is a plan for the next size."""
    sizes = [Problem(16, 16, 64), Problem(16, 16, 32)]
    reached, screened = threading.Event(), list[Config]()
    waited: list[bool] = []

    class Device(FakeEvaluator):
        def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
            for trial in super().screen(problem, artifacts, best_s):
                screened.append(trial.config)
                if len(screened) == 2:
                    reached.set()
                yield trial

    def plans(planner: Planner, jobs: Sequence[SearchJob]) -> Generator[PlannedSearch, None, None]:
        yield jobs[0].planned_here(jobs[0].plan())
        waited.append(reached.wait(20))
        yield jobs[1].planned_here(jobs[1].plan())

    monkeypatch.setattr(Planner, "plan", plans)
    options = TuningOptions(tmp_path, "guided", budget=2, library="")
    with pool_and_store(tmp_path) as (pool, store):
        assert TuningRun([Device()], pool, store, options, Reporter()).tune(sizes) == {}
    assert waited == [True] and len(screened) == 4


def test_algorithms_that_a_library_ranks_low_wait_for_generated_kernels(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its best guesses do not; all are screened in the end."""
    algorithms = [Config("heuristic", 64, 64, 64, options=(("index", i),), backend="blaslt") for i in range(12)]
    put, queued = DeviceQueue.put, dict[Config, bool]()

    def watched(queue: DeviceQueue[Task, Work], size: Task, work: Work, later: bool = False) -> None:
        if isinstance(work, ScreenWork):
            queued[work.artifact.config] = later
        put(queue, size, work, later)

    class Device(FakeEvaluator):
        def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
            return algorithms

    monkeypatch.setattr(DeviceQueue, "put", watched)
    evaluator = Device()
    assert race(tmp_path, ("blaslt", "triton"), evaluator)[0] == {}
    assert [queued[c] for c in algorithms] == [False] * 8 + [True] * 4 and set(algorithms) < set(evaluator.screened)
    assert not any(later for config, later in queued.items() if config.backend == "triton")


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_sizes_are_finished_in_order_unless_time_is_limited(tmp_path: Path, monkeypatch: Patch, seconds: float) -> None:
    """The best predicted of each go first, always."""
    put, turns = CompileQueue.put, dict[Problem, list[int]]()

    def watched(queue: CompileQueue, task: Task, config: Config, job: CompileJob, turn: int) -> None:
        turns.setdefault(task.problem, []).append(turn)
        put(queue, task, config, job, turn)

    monkeypatch.setattr(CompileQueue, "put", watched)
    options = TuningOptions(tmp_path, budget=10, library="", seconds=seconds)
    large, small = Problem(64, 64, 128), Problem(16, 64, 128)
    with pool_and_store(tmp_path) as (pool, store):
        monkeypatch.setattr(pool, "build", lambda job: Artifact(job.config, job.digest, status="compile_failed"))
        TuningRun([FakeEvaluator()], pool, store, options, Reporter()).tune([small, large])
    assert turns == {large: [0] * 8 + [1] * 2, small: [0] * 8 + [1 if seconds else 2] * 2}


def test_a_kernel_beside_the_products_that_fails_to_compile_costs_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """It is asked for once, though both sizes would be measured with it."""
    options, asked = TuningOptions(tmp_path, budget=1, library=""), list[str]()
    helper = CompileJob(Config("quantize_rows", 0, 0, 0), {"source": "for a test"})
    monkeypatch.setattr(run_module, "compile_jobs", lambda problem, evaluator: [helper])
    with pool_and_store(tmp_path) as (pool, store):
        own = pool.build

        def build(job: CompileJob) -> Artifact:
            asked.append(job.config.template)
            return Artifact(job.config, job.digest, status="compile_failed") if job is helper else own(job)

        monkeypatch.setattr(pool, "build", build)
        failed = TuningRun([FakeEvaluator()], pool, store, options, Reporter()).tune(
            [Problem(64, 64, 128), Problem(16, 64, 128)]
        )
    assert not failed and asked.count("quantize_rows") == 1


def test_a_run_that_fails_has_nothing_more_compiled(tmp_path: Path, monkeypatch: Patch) -> None:
    """What waits for a compiler when the disk is full is not compiled, though the compilers are still there."""
    built, failed = list[CompileJob](), threading.Event()

    def full(*_: object) -> None:
        failed.set()
        raise OutputError("disk full")

    def build(job: CompileJob) -> Artifact:
        built.append(job)
        if failed.is_set() or (len(built) == 2 and failed.wait(20)):
            time.sleep(0.05)  # as a compile takes a while, in which the run ends
        return Artifact(job.config, job.digest, status="compile_failed", reason="for a test")

    options = TuningOptions(tmp_path, budget=30, library="")
    with pool_and_store(tmp_path) as (pool, store):
        monkeypatch.setattr(pool, "build", build)
        monkeypatch.setattr(store, "add_trials", full)
        with pytest.raises(OutputError, match="disk full"):
            TuningRun([FakeEvaluator()], pool, store, options, Reporter()).tune([Problem(64, 64, 128)])
        for thread in [t for t in threading.enumerate() if t.name in ("builds", "compile jobs")]:
            thread.join(20)
    assert len(built) < 10, "of 30: those that had begun when the disk was full"


def test_sizes_that_time_was_too_short_for_say_so(tmp_path: Path) -> None:
    options = TuningOptions(tmp_path, budget=2, library="", seconds=1e-9, stop="compile")
    with pool_and_store(tmp_path) as (pool, store):
        failures = TuningRun([FakeEvaluator()], pool, store, options, Reporter()).tune([SIZE])
    assert failures == {SIZE: "its kernels were not compiled within the 1e-09 s of --budget"}

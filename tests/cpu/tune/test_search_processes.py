import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import pairwise
from tests.support.evaluators import FakeEvaluator
from tests.support.lent_processes import LentProcess
from tests.support.nouns import Config, OutputError, Patch, Problem, Record, SearchLimits, Trial, load_target, matrices
from tests.support.planning_roles import WorkerKilledAlways, WorkerKilledLater, WorkerKilledOnce, signature
from tests.support.racing import pool_and_store
from tests.support.refusals import fails
from tests.support.tables import apart, each, heavy
from tritongemm.build.prepare import compile_job
from tritongemm.codegen.modules import winner_path
from tritongemm.plugins.contracts import Search
from tritongemm.report.console import Reporter
from tritongemm.search.planner import rank_space
from tritongemm.tune import search_processes
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.run import TuningRun
from tritongemm.tune.search_processes import Planner, RankJob, SearchJob, SearchProcess, SearchWorker, WinnerModule

GFX942 = load_target("gfx942")
PROBLEMS = [Problem(16, 16, k) for k in (64, 32)]


def jobs(folder: Path, strategy: str = "guided") -> list[SearchJob]:
    """The problems, searched with few configs."""
    limits = SearchLimits(templates=("tile",), axes=(("num_stages", (1, 2)),))
    return [SearchJob(problem, GFX942, folder, "triton", limits, strategy, budget=60) for problem in PROBLEMS]


def seconds_of(config: Config) -> float:
    return 1e-6 * (1 + sum(config.tile) % 7) * config.split_k / config.num_warps


def batches_of(search: Search) -> list[list[Config]]:
    """The batches of a search that is sent times of its configs."""
    batches = [next(search)]
    try:
        while True:
            batches.append(search.send([Trial(c, "ok", "", (seconds_of(c),), "sundial") for c in batches[-1]]))
    except StopIteration:
        return batches


def work_as(monkeypatch: Patch, worker: type) -> None:
    """Have processes do what a class of `tests.support.planning_roles` does."""
    monkeypatch.setattr(SearchProcess, "ROLE", f"{worker.__module__}:{worker.__name__}")


@pytest.mark.parametrize(("worker", "processes"), [(WorkerKilledOnce, 2), heavy(WorkerKilledAlways, 1)])
def test_a_killed_process_costs_no_problem(tmp_path: Path, monkeypatch: Patch, worker: type, processes: int) -> None:
    work_as(monkeypatch, worker)
    with closing(Planner(processes)) as planning:
        found = list(planning.plan(jobs(tmp_path)))
    signed = [list(one.pruned.reasons) for one in found]
    assert signed == [[p.key] for p in PROBLEMS] if worker is WorkerKilledOnce else all(one.kept for one in found)


def test_kernels_that_no_process_ranks_are_ranked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of distinct tiles, the best predicted first."""
    monkeypatch.setattr(SearchProcess, "_ask", lambda *_: None)
    ranked = [RankJob(problem, GFX942, "triton", SearchLimits(templates=("tile",))) for problem in PROBLEMS]
    with closing(Planner(1)) as planner:
        found = list(planner.best(ranked))
    assert found == list(Planner(0).best(ranked)) and all(found)
    assert [rank_space(p, GFX942, "triton", ranked[0].limits)[2].configs[0] for p in PROBLEMS] == [f[0] for f in found]
    assert all(len({(c.tile, c.split_k) for c in best}) == len(best) for best in found)


QUICK = [("guided", WorkerKilledLater, True)]
ALL = pairwise(["guided", "genetic", "exhaustive"], [SearchWorker, WorkerKilledLater], [False, True])


@apart(*QUICK, *(heavy(*case) for case in ALL if case not in QUICK))
def test_searches_are_alike(strategy: str, worker: type, shares: bool, /, tmp_path: Path, monkeypatch: Patch) -> None:
    """In this process, in another one, or begun again where that one is lost; and brings what is to be compiled."""
    if worker is not SearchWorker:
        work_as(monkeypatch, worker)
    wanted = jobs(tmp_path, strategy)
    plans = [job.plan() for job in wanted]
    built = {c.kernel_name for plan in plans for c in plan.order.configs[::7]} if shares else set()
    here = [batches_of(job.search(plan, (), built)) for job, plan in zip(wanted, plans, strict=True)]
    with closing(Planner(1)) as planning:
        found = list(planning.plan(wanted))
        there = [batches_of(one.begin((), built)) for one in found]
    assert there == here and all(map(len, here))
    if strategy == "guided":
        assert len(here[0]) > 3, "the process is killed before the search ends"
        first, made = here[0][0][0], found[0].jobs
        assert made[first.name] == compile_job(PROBLEMS[0], first, GFX942)
        assert worker is not SearchWorker or made.keys() == {c.name for batch in here[0] for c in batch}


def test_a_run_tries_the_same_with_processes_as_without(tmp_path: Path, monkeypatch: Patch) -> None:
    """Each size the same configs; with the same times, as later batches follow from those. They share no kernels."""
    sizes = [Problem(16, 16, 64), Problem(16, 16, 32, *matrices(layout="TN"))]
    limits = SearchLimits(templates=("tile",), axes=(("num_stages", (1, 2)),))
    options = TuningOptions(tmp_path, "guided", budget=5, library="", limits=limits)
    tried = list[dict[Problem, list[str]]]()
    for few in (99, 1):
        monkeypatch.setattr(search_processes, "FEW_PROBLEMS", few)
        evaluator = FakeEvaluator(seconds=seconds_of)
        with pool_and_store(tmp_path / str(few)) as (pool, store):
            assert TuningRun([evaluator], pool, store, options, Reporter()).tune(sizes) == {}
            tried.append({s: sorted(name for name, stage in store.trials(s) if stage == "screen") for s in sizes})
    assert tried[0] == tried[1] and all(len(names) >= 4 for names in tried[0].values()), "several batches"


def test_a_process_writes_a_winners_module(tmp_path: Path, monkeypatch: Patch) -> None:
    config = Config("tile", 16, 16, 32, num_warps=1, num_stages=1)
    record = Record(PROBLEMS[0], GFX942.name, config, "triton", 1e-6, 0.0, "events")
    module = WinnerModule("triton", record, GFX942, tmp_path)
    for worker in (SearchWorker, WorkerKilledAlways):
        with monkeypatch.context() as patch, closing(Planner(1)) as planning:
            if worker is SearchWorker:
                patch.setattr(WinnerModule, "write", pytest.fail)
            else:
                work_as(patch, worker)
            planning.write(module)
            planning.finish_modules()
        winner_path(PROBLEMS[0], tmp_path).unlink()


def test_processes_end_with_the_planner(tmp_path: Path, monkeypatch: Patch) -> None:
    """There are no more than problems; few problems need none."""
    made: list[LentProcess] = []

    class WatchedProcess(LentProcess):
        def __init__(self, role: str) -> None:
            super().__init__(role)
            made.append(self)

    monkeypatch.setattr(search_processes, "WorkerProcess", WatchedProcess)
    assert [Planner.for_problems(*counts).width for counts in ((3, 99), (99, 1), (4, 99), (99, 4))] == [1, 1, 4, 2]
    made.clear()
    planning = Planner(len(PROBLEMS))
    search = next(planning.plan(jobs(tmp_path))).begin((), ())
    next(search)
    planning.close()
    assert len(made) == len(PROBLEMS) and not any(child.alive for child in made), "who wants no more leaves none"
    fails(StopIteration, "", search.send, [])
    fails(CancelledError, "", SearchProcess.begin, planning._processes[0], jobs(tmp_path)[0])
    assert not any(child.alive for child in made), "nor is one started again"


def test_who_waits_for_a_batch_goes_before_who_plans(tmp_path: Path, monkeypatch: Patch) -> None:
    """Though planning was asked for earlier."""
    order, busy, go_on = list[str](), threading.Event(), threading.Event()

    class SlowProcess:
        def ask(self, request: Any, timeout: float) -> Iterator[Any]:
            order.append(request if isinstance(request, str) else "batch")
            if request == "slow":
                busy.set()
                go_on.wait(20)
            yield None

        def kill(self) -> None:
            pass

    monkeypatch.setattr(search_processes, "WorkerProcess", lambda role: SlowProcess())
    process, job = SearchProcess(), jobs(tmp_path)[0]
    search = process.search(job, signature(""), {}, (), ())
    next(search)
    unchecked: Any = process.begin
    threads = [threading.Thread(target=unchecked, args=(name,)) for name in ("slow", "plan", "plan")]
    for thread in threads:
        thread.start()
        busy.wait(20)
    threads.append(threading.Thread(target=lambda: list(iter(lambda: _sent(search), None))))
    threads[-1].start()
    while not process._waiting_for_batch:
        pass
    go_on.set()
    for thread in threads:
        thread.join()
    assert order == ["slow", "batch", "plan", "plan"]


def _sent(search: Search) -> list[Config] | None:
    try:
        return search.send([])
    except StopIteration:
        return None


def test_what_can_not_be_planned_or_computed_is_reported_as_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be written"), closing(Planner(2)) as planning:
        list(planning.plan(jobs(tmp_path / "file")))
    limits = SearchLimits(templates=("stream_k",))  # which computes no batches
    with closing(Planner(1)) as planning:
        (found,) = planning.plan([SearchJob(Problem(16, 64, 128, batch=2), GFX942, tmp_path, "triton", limits)])
        assert batches_of(found.begin((), ())) == [[]] and not found.kept


@each(("problems", "cores", "width"), [(3, 8, 1), (4, 8, 4), (9, 1, 1), (200, 16, 8), (200, 128, 32)])
def test_how_many_processes_there_are(problems: int, cores: int, width: int) -> None:
    """One for two compilers; a host of many GPUs has cores for more than its memory should hold."""
    planning = Planner.for_problems(problems, cores)
    planning.close()
    assert planning.width == width

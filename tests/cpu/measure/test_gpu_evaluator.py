import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.support.nouns import Artifact, Backend, Config, Groups, Launch, MeasureProtocol, Patch, fails, registry
from tritongemm.core.errors import TritonGemmError, UnavailableError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.jobs import (
    Algorithms,
    AlgorithmsJob,
    LaunchCandidate,
    MeasureAnswer,
    MeasureJob,
    NowRacing,
    OperandsReady,
    QuantizeJob,
    RaceJob,
    RaceSamples,
    ScreenJob,
    VerifyJob,
)
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerTimeout

SIZE = Problem(24, 40, 16, *matrices("fp32"))
READY = OperandsReady(1, True)
CONFIGS = [Config("heuristic", n, 0, 0, backend="blaslt") for n in (1, 2, 3)]
ARTIFACTS = [Artifact(c, "") for c in CONFIGS]

Answer = Callable[[MeasureJob], Iterator[MeasureAnswer]]
Answering = Callable[[Answer], list[MeasureJob]]


@pytest.fixture
def gpu() -> GpuEvaluator:
    return GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)


@pytest.fixture
def answering(gpu: GpuEvaluator, monkeypatch: Patch) -> Answering:
    """Has an answer stand for the process, and returns the jobs that it is sent."""

    def stand_in(answer: Answer) -> list[MeasureJob]:
        jobs: list[MeasureJob] = []

        def ask(job: MeasureJob, timeout: float) -> Iterator[MeasureAnswer]:
            jobs.append(job)
            yield from answer(job)

        monkeypatch.setattr(gpu._process, "ask", ask)
        return jobs

    return stand_in


def configs_of(job: MeasureJob) -> list[Config]:
    assert not isinstance(job, AlgorithmsJob | QuantizeJob)
    return [c.config for c in job.candidates]


def samples_of(configs: Sequence[Config]) -> RaceSamples:
    return RaceSamples({c.name: [1.0] for c in configs})


def passed(config: Config) -> Trial:
    return Trial(config, "ok", samples=(1.0,))


def answers(job: MeasureJob, trial: Callable[[Config], Trial] = passed) -> Iterator[MeasureAnswer]:
    yield READY
    yield from map(trial, configs_of(job))
    if isinstance(job, RaceJob):
        yield samples_of(configs_of(job))


def test_gpu_processes_list_what_a_library_has(gpu: GpuEvaluator, answering: Answering, monkeypatch: Patch) -> None:
    def answer(job: MeasureJob) -> Iterator[MeasureAnswer]:
        yield READY
        if len(jobs) == 2:
            raise WorkerError("UnavailableError: no library")
        yield Algorithms((CONFIGS[0],))

    jobs = answering(answer)
    monkeypatch.setattr(registry.get(Backend, "blaslt"), "available", lambda: SUPPORTED)
    assert gpu.list_algorithms(SIZE, "blaslt", 9) == [CONFIGS[0]]
    (job,) = jobs
    assert isinstance(job, AlgorithmsJob) and (job.backend, job.setup.problem, job.limit) == ("blaslt", SIZE, 9)
    fails(TritonGemmError, "UnavailableError: no library", gpu.list_algorithms, SIZE, "blaslt", 9)
    monkeypatch.setattr(registry.get(Backend, "blaslt"), "available", lambda: Support("not here"))
    fails(UnavailableError, "not here", gpu.list_algorithms, SIZE, "blaslt", 9)
    assert len(jobs) == 2


def test_libraries_list_what_they_can_compute(gpu: GpuEvaluator, answering: Answering, monkeypatch: Patch) -> None:
    """cuBLASLt would list algorithms for one product of a grouped problem's sizes."""
    jobs = answering(lambda job: iter([READY, Algorithms((CONFIGS[0],))]))
    monkeypatch.setattr(registry.get(Backend, "blaslt"), "available", lambda: SUPPORTED)
    with pytest.raises(UnavailableError, match="computes single and batched products, not grouped ones"):
        gpu.list_algorithms(replace(SIZE, groups=Groups(4)), "blaslt", 9)
    assert not jobs


def test_a_library_launches_its_algorithms_itself(gpu: GpuEvaluator, answering: Answering) -> None:
    jobs = answering(answers)
    (trial,) = gpu.screen(SIZE, ARTIFACTS[:1], 1.5)
    (job,) = jobs
    assert isinstance(job, ScreenJob) and trial.config == CONFIGS[0] and job.best_s == 1.5
    assert [(c.config, c.launch) for c in job.candidates] == [(CONFIGS[0], None)]


def test_each_candidate_is_verified_by_itself(gpu: GpuEvaluator, answering: Answering) -> None:
    jobs = answering(answers)
    trials = list(gpu.verify(SIZE, ARTIFACTS))
    assert [t.config for t in trials] == CONFIGS and {t.timer for t in trials} == {"graph-events"}
    assert all(isinstance(job, VerifyJob) for job in jobs)
    assert [configs_of(job) for job in jobs] == [[c] for c in CONFIGS]


def test_a_candidate_without_a_launch_or_that_raises_costs_itself(gpu: GpuEvaluator, answering: Answering) -> None:
    unlaunched = Config("tile", 16, 16, 16)

    def trial(config: Config) -> Trial:
        if config == CONFIGS[1]:
            raise WorkerError("ValueError: what the binding makes of it")
        return passed(config)

    answering(lambda job: answers(job, trial))
    built = [Artifact(unlaunched, "", status="compile_failed", reason="no code"), *ARTIFACTS]
    for trials in (list(gpu.screen(SIZE, built, 1.0)), gpu.race(SIZE, built, "").trials):
        found = {t.config.block_m: (t.status, t.reason) for t in trials}
        assert found == {
            16: ("out_of_resources", f"{unlaunched.name} was not compiled: no code"),
            1: ("ok", ""),
            2: ("crashed", "ValueError: what the binding makes of it"),
            3: ("ok", ""),
        }


def test_failures_before_candidates_run_are_no_fault_of_theirs(gpu: GpuEvaluator, answering: Answering) -> None:
    """It is tried in a new process, more often if a program killed it; then the size fails, not its candidates."""
    faults: list[Exception] = [WorkerDied("signal SIGKILL")]

    def answer(job: MeasureJob) -> Iterator[MeasureAnswer]:
        if faults:
            raise faults.pop(0)
        yield from answers(job)

    jobs = answering(answer)
    assert [t.status for t in gpu.screen(SIZE, ARTIFACTS[:2], 1.0)] == ["ok", "ok"] and len(jobs) == 2
    killed = WorkerDied("signal SIGKILL", from_outside=True)
    faults += [killed, killed]
    assert [t.status for t in gpu.screen(SIZE, ARTIFACTS[:2], 1.0)] == ["ok", "ok"] and len(jobs) == 5
    faults += [killed, killed, killed]
    fails(TritonGemmError, "signal SIGKILL", list, gpu.screen(SIZE, ARTIFACTS[:2], 1.0))
    faults += [WorkerError("OutOfMemoryError: 90 GiB"), WorkerTimeout("did not start within 120 s")]
    fails(TritonGemmError, "did not start within 120 s", list, gpu.screen(SIZE, ARTIFACTS[:2], 1.0))


def test_a_kernel_that_hangs_holds_a_warm_device_for_seconds_alone(monkeypatch: Patch) -> None:
    """First calls, library algorithms, sizes of which nothing is timed and slow sizes have the complete limit."""
    gpu = GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 60)
    launch = Launch("k.cubin", "k", (1, 1, 1), (128, 1, 1), 0, (), ())
    limits: list[float] = []
    hangs = False

    def ask(job: MeasureJob, timeout: float) -> Iterator[MeasureAnswer]:
        limits.append(timeout)
        yield READY
        if hangs and len(configs_of(job)) > 1:
            raise WorkerTimeout("no answer")
        yield from (Trial(c, "ok", samples=(1e-5,)) for c in configs_of(job))

    def screen(problem: Problem, best_s: float, count: int = 1, launch: Launch | None = launch) -> list[Trial]:
        limits.clear()
        given = [LaunchCandidate(c, launch) for c in CONFIGS[:count]]
        monkeypatch.setattr(gpu, "_candidates", lambda *_: (given, []))
        return list(gpu.screen(problem, ARTIFACTS[:count], best_s))

    monkeypatch.setattr(gpu._process, "ask", ask)
    assert screen(SIZE, math.inf) and limits == [60], "a first call"
    assert screen(SIZE, 1e-5) and limits == [6]
    assert screen(SIZE, 0.5) and limits == [50], "of a size that takes half a second"
    assert screen(SIZE, 2.0) and screen(SIZE, math.inf) and limits == [60]
    assert screen(SIZE, 1e-5, launch=None) and limits == [60], "a library's algorithm"
    assert screen(replace(SIZE, m=25), 1e-5) and limits == [60], "another size, whose operands are not made yet"
    hangs = True
    found = screen(SIZE, 1e-5, 2)
    assert limits == [6, 60], "what hung ended the process: a first call again"
    assert [t.status for t in found] == ["timeout", "ok"] and found[0].reason == "no answer within 6 s; killed"


@pytest.mark.parametrize("in_rounds", [False, True])
def test_who_hangs_in_the_race_costs_itself(gpu: GpuEvaluator, answering: Answering, in_rounds: bool) -> None:
    """The process names the entry that warms up; after that none is to blame, and the race is tried again.

    Naming each sample's runner costs time, so it begins after a death that no one can be blamed for.
    """
    late = [WorkerTimeout("no answer")] * (0 if in_rounds else 2)

    def answer(job: MeasureJob) -> Iterator[MeasureAnswer]:
        assert isinstance(job, RaceJob)
        yield READY
        yield from (Trial(c, "ok", stage="final") for c in configs_of(job))
        for config in configs_of(job):
            yield NowRacing(config.name if job.names_runners or not in_rounds else "")
            if config == CONFIGS[1]:
                raise WorkerTimeout("no answer")
        yield NowRacing("")
        if late:
            raise late.pop()
        yield samples_of(configs_of(job))

    jobs = answering(answer)
    final = gpu.race(SIZE, ARTIFACTS, "torch")
    assert final.samples.keys() == {CONFIGS[0].name, CONFIGS[2].name}
    assert {t.config.block_m: t.status for t in final.trials} == {1: "ok", 2: "timeout", 3: "ok"}
    assert final.trials[-1].reason == "in the race: no answer within 5 s; killed"
    named = [isinstance(job, RaceJob) and job.names_runners for job in jobs]
    assert named == ([False, True, True] if in_rounds else [False, False, True, True])


def test_a_baseline_that_hangs_costs_no_candidate(gpu: GpuEvaluator, answering: Answering) -> None:
    """No candidate leaves the race for it; it is given up when it hangs every time."""

    def answer(job: MeasureJob) -> Iterator[MeasureAnswer]:
        yield READY
        yield from (Trial(c, "ok", stage="final") for c in configs_of(job))
        yield NowRacing(BASELINE_ENTRY)
        raise WorkerTimeout("no answer")

    jobs = answering(answer)
    fails(TritonGemmError, "the final race ended 3 times: no answer within 5 s", gpu.race, SIZE, ARTIFACTS, "torch")
    assert [len(configs_of(job)) for job in jobs] == [3, 3, 3]


@pytest.mark.parametrize("deaths", [1, 2])
def test_processes_that_others_kill_are_no_ones_fault(gpu: GpuEvaluator, answering: Answering, deaths: int) -> None:
    """It is tried again once; if it is killed once more, a later run tries it again."""
    left: list[int] = []

    def trial(config: Config) -> Trial:
        if config == CONFIGS[1] and left:
            left.pop()
            raise WorkerDied("signal SIGKILL", from_outside=True)
        return passed(config)

    answering(lambda job: answers(job, trial))
    for measure in (lambda: gpu.screen(SIZE, ARTIFACTS, 1.0), lambda: gpu.race(SIZE, ARTIFACTS, "").trials):
        left[:] = range(deaths)
        trials = {t.config: t for t in measure()}
        assert {c: t.status for c, t in trials.items() if c != CONFIGS[1]} == dict.fromkeys(CONFIGS[::2], "ok")
        killed = trials[CONFIGS[1]]
        assert (killed.status, killed.try_again) == (("ok", False) if deaths == 1 else ("crashed", True))


@pytest.mark.parametrize("end", [WorkerDied("exit status 1"), WorkerTimeout("no answer")])
def test_a_fault_costs_no_other(gpu: GpuEvaluator, answering: Answering, end: Exception) -> None:
    """Even where the process does not manage to end after it."""

    def answer(job: MeasureJob) -> Iterator[MeasureAnswer]:
        yield READY
        for config in configs_of(job):
            status = "crashed" if config == CONFIGS[0] else "ok"
            yield Trial(config, status, "illegal", (1.0,))
            if status == "crashed":
                raise end
        if isinstance(job, RaceJob):
            yield samples_of(configs_of(job))

    answering(answer)
    for trials in (gpu.screen(SIZE, ARTIFACTS, 1.0), gpu.race(SIZE, ARTIFACTS, "").trials):
        assert {t.config.block_m: t.status for t in trials} == {1: "crashed", 2: "ok", 3: "ok"}

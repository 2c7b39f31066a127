"""What the parent makes of the answers of the GPU's process, and of its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tritongemm.backends.blaslt import backend as blaslt
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, TritonGemmError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.trial import Trial
from tritongemm.measure import gpu_evaluator
from tritongemm.measure.jobs import Request
from tritongemm.plugins import _modules as registry
from tritongemm.search_spaces import loader as target_files
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerTimeout

SIZE = Problem(24, 40, 16, "fp32", "fp32", "fp32")


def test_the_gpu_process_is_asked_for_what_a_library_has(monkeypatch):
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    asked, config = [], Config("heuristic", 0, 0, 0, backend="blaslt")

    def ask(request, timeout):
        asked.append(request)
        yield {"copies": 1, "cold": True}
        if len(asked) == 2:
            raise WorkerError("UnavailableError: no library")
        yield [config]

    monkeypatch.setattr(gpu._child, "ask", ask)
    monkeypatch.setattr(registry, "unavailable", lambda kind, name: None)
    problem = Problem(5, 7, 3)
    assert gpu.list_algorithms(problem, "blaslt", 9) == [config]
    assert (asked[0].kind, asked[0].library, asked[0].problem, asked[0].most) == ("enumerate", "blaslt", problem, 9)
    with pytest.raises(TritonGemmError, match="UnavailableError: no library"):
        gpu.list_algorithms(problem, "blaslt", 9)
    monkeypatch.setattr(registry, "unavailable", lambda kind, name: "not here")
    with pytest.raises(UnavailableError, match="not here"):
        gpu.list_algorithms(problem, "blaslt", 9)
    assert len(asked) == 2
    assert gpu._launches(problem, [Artifact(config, "")], "screen") == ([(config, None)], [])


def test_a_candidate_without_a_launch_or_that_raises_costs_itself(monkeypatch):
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    configs = [Config("heuristic", i, 0, 0, backend="blaslt") for i in range(4)]

    def launch(built, problem, target):
        if built.config == configs[0]:
            raise InputError("no launch for it")

    def ask(request, timeout):
        yield {"copies": 1, "cold": True}
        for config, _ in request.candidates:
            if config == configs[2]:
                raise WorkerError("ValueError: what the binding makes of it")
            yield Trial(config, "ok", samples=(1.0,), stage=request.kind)
        if request.kind == "final":
            yield {c.name: [1.0] for c, _ in request.candidates}

    monkeypatch.setattr(blaslt, "launch", launch)
    monkeypatch.setattr(gpu._child, "ask", ask)
    built = [Artifact(c, "") for c in configs]
    for trials in (list(gpu.screen(Problem(5, 7, 3), built, 1.0)), gpu.race(Problem(5, 7, 3), built, "").trials):
        found = {t.config.block_m: (t.status, t.reason) for t in trials}
        assert found == {
            0: ("out_of_resources", "no launch for it"),
            1: ("ok", ""),
            2: ("crashed", "ValueError: what the binding makes of it"),
            3: ("ok", ""),
        }


def test_a_process_that_fails_before_a_candidate_ran_is_no_candidates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again afresh; then the size fails, not its candidates one by one."""
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    built = [Artifact(Config("heuristic", n, 0, 0, backend="blaslt"), "") for n in (1, 2)]
    faults: list[Exception] = [WorkerDied("signal SIGKILL")]
    asked = []

    def ask(request: Request, timeout: float) -> Iterator[Any]:
        asked.append(request)
        if faults:
            raise faults.pop(0)
        yield {"copies": 1, "cold": True}
        yield from (Trial(c, "ok", samples=(1.0,)) for c, _ in request.candidates)

    monkeypatch.setattr(gpu._child, "ask", ask)
    assert [t.status for t in gpu.screen(SIZE, built, 1.0)] == ["ok", "ok"] and len(asked) == 2
    faults += [WorkerError("OutOfMemoryError: 90 GiB"), WorkerTimeout("did not start within 120 s")]
    with pytest.raises(TritonGemmError, match="did not start within 120 s"):
        list(gpu.screen(SIZE, built, 1.0))


def test_who_hangs_in_the_race_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process says who warms up; after that nobody is to blame, and the race is tried again."""
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    configs = [Config("heuristic", n, 0, 0, backend="blaslt") for n in (1, 2, 3)]
    late = [WorkerTimeout("no answer")] * 2

    def ask(request: Request, timeout: float) -> Iterator[Any]:
        yield {"copies": 1, "cold": True}
        yield from (Trial(c, "ok", stage="final") for c, _ in request.candidates)
        for config, _ in request.candidates:
            yield {"racing": config.name}
            if config == configs[1]:
                raise WorkerTimeout("no answer")
        yield {"racing": ""}
        if late:
            raise late.pop()
        yield {c.name: [1.0] for c, _ in request.candidates}

    monkeypatch.setattr(gpu._child, "ask", ask)
    final = gpu.race(SIZE, [Artifact(c, "") for c in configs], "torch")
    assert final.samples.keys() == {configs[0].name, configs[2].name}
    assert {t.config.block_m: t.status for t in final.trials} == {1: "ok", 2: "timeout", 3: "ok"}
    assert final.trials[-1].reason == "in the race: no answer within 5 s; killed"


def test_who_hangs_in_the_rounds_is_found_at_the_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming each sample's runner costs time, so it begins after a death that nobody can be blamed for."""
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    configs = [Config("heuristic", n, 0, 0, backend="blaslt") for n in (1, 2, 3)]
    watched = []

    def ask(request: Request, timeout: float) -> Iterator[Any]:
        watched.append(request.watched)
        yield {"copies": 1, "cold": True}
        yield from (Trial(c, "ok", stage="final") for c, _ in request.candidates)
        yield {"racing": ""}
        for config, _ in request.candidates:
            if request.watched:
                yield {"racing": config.name}
            if config == configs[1]:
                raise WorkerTimeout("no answer")
        yield {c.name: [1.0] for c, _ in request.candidates}

    monkeypatch.setattr(gpu._child, "ask", ask)
    final = gpu.race(SIZE, [Artifact(c, "") for c in configs], "torch")
    assert watched == [False, True, True]
    assert final.samples.keys() == {configs[0].name, configs[2].name}
    assert {t.config.block_m: t.status for t in final.trials} == {1: "ok", 2: "timeout", 3: "ok"}


@pytest.mark.parametrize("end", [WorkerDied("exit status 1"), WorkerTimeout("no answer")])
def test_a_fault_costs_nobody_else(monkeypatch: pytest.MonkeyPatch, end: Exception) -> None:
    """Even where the process does not manage to end after it."""
    gpu = gpu_evaluator.GpuEvaluator(target_files.load_target("sm90"), "nvidia", 0, MeasureProtocol(), 5)
    configs = [Config("heuristic", n, 0, 0, backend="blaslt") for n in (1, 2, 3)]

    def ask(request: Request, timeout: float) -> Iterator[Any]:
        yield {"copies": 1, "cold": True}
        for config, _ in request.candidates:
            status = "crashed" if config == configs[0] else "ok"
            yield Trial(config, status, "illegal", (1.0,), stage=request.kind)
            if status == "crashed":
                raise end
        if request.kind == "final":
            yield {c.name: [1.0] for c, _ in request.candidates}

    monkeypatch.setattr(gpu._child, "ask", ask)
    built = [Artifact(c, "") for c in configs]
    for trials in (gpu.screen(SIZE, built, 1.0), gpu.race(SIZE, built, "").trials):
        assert {t.config.block_m: t.status for t in trials} == {1: "crashed", 2: "ok", 3: "ok"}

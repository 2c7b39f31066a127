from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import SUPPORTED, Artifact, CompileJob, Config, Problem, Record, Support, Trial, matrices
from tritongemm.tune import repair
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.repair import Repair, list_neighbours

SIZE = Problem(64, 128, 256, *matrices("bf16"))
TILES = [Config("tile", rows, 32, 32) for rows in (16, 32, 64, 128)]
SLOW, OWN, NEAR, FAR = TILES[3], TILES[2], TILES[1], TILES[0]
OPTIONS = TuningOptions(Path("unused"), toolchain={"triton": "4.0"})


def record(problem: Problem, config: Config, **changes: Any) -> Record:
    return replace(Record(problem, "gfx942", config, "triton", 9e-6, 0.01, "events"), **changes)


def kept(before: Record, after: Record) -> Support:
    return SUPPORTED


def test_neighbours_are_near_and_of_the_same_kind() -> None:
    stale = record(SIZE, SLOW)
    known = [
        stale,
        record(replace(SIZE, m=4096), FAR),
        record(replace(SIZE, m=80), NEAR),
        record(replace(SIZE, a=SIZE.a._replace(dtype="fp16"), b=SIZE.b._replace(dtype="fp16")), OWN),
        record(replace(SIZE, m=70), OWN, target="sm90"),
    ]
    assert list_neighbours(stale, known, ()) == [SLOW, NEAR, FAR]
    trials = [Trial(OWN, "ok", samples=(2e-6,), stage="screen"), Trial(NEAR, "ok", samples=(1e-6,), stage="screen")]
    trials += [Trial(FAR, "ok", samples=(5e-6,), stage="final"), Trial(SLOW, "crashed")]
    assert list_neighbours(stale, known, trials) == [SLOW, FAR, NEAR, OWN], "what raced goes before what was screened"


def test_the_fastest_takes_the_place_of_a_stale_result(monkeypatch: Any) -> None:
    """Of a range only what is one binary all over it races."""

    def job(problem: Problem, config: Config, target: object) -> CompileJob:
        return CompileJob(config, {"of": config.name, "m": problem.m if config == FAR else 0})

    monkeypatch.setattr(repair, "compile_job", job)
    built = lambda jobs: (
        Artifact(j.config, j.digest, sha256="5" * 64, status="timeout" if j.config == SLOW else "ok") for j in jobs
    )
    pool: Any = SimpleNamespace(stream=built)
    evaluator = FakeEvaluator(baseline_seconds=4e-5, rounds=9)
    monkeypatch.setattr("tests.support.evaluators.require_launch", lambda *_: None)
    stale = record(SIZE, SLOW, m_from=8, notes={"aiter": 1})
    known = [
        stale,
        record(replace(SIZE, m=80), NEAR),
        record(replace(SIZE, m=90), FAR),
        record(replace(SIZE, m=99), OWN),
    ]
    ((before, after),) = Repair([evaluator], pool, OPTIONS, kept, print).repair([stale], known, {})
    assert before is stale and evaluator.raced == [NEAR, OWN]
    assert isinstance(after, Record) and (after.config, after.m_from, after.code) == (NEAR, 8, "5" * 64)
    assert after.toolchain == {"triton": "4.0"} and after.problem == SIZE and after.notes == {"aiter": 1}
    assert after.library_seconds == 4e-5 and after.winner == "triton"


def test_what_can_not_be_raced_keeps_its_place(monkeypatch: Any) -> None:
    monkeypatch.setattr(repair, "compile_job", lambda *_: Support("no compiler"))
    pool: Any = SimpleNamespace(stream=lambda jobs: iter(list(jobs)))
    stale = record(SIZE, SLOW)
    ((_, after),) = Repair([FakeEvaluator()], pool, OPTIONS, kept, print).repair([stale], [stale], {})
    assert after == Support("none of its neighbours can be compiled")
    library = Config("auto", 0, 0, 0, backend="torch")
    full = FakeEvaluator(fits=lambda p: False)
    ((_, after),) = Repair([full], pool, OPTIONS, kept, print).repair([record(SIZE, library)], [], {})
    assert after == Support("out of memory")


def test_a_device_races_nothing_while_a_result_is_kept(monkeypatch: Any) -> None:
    """And what can't be kept is reported as what can't be raced is."""
    monkeypatch.setattr(repair, "brings_kernels", lambda config: False)
    gpu, stale, raced = FakeEvaluator(rounds=9), [record(replace(SIZE, m=m), SLOW) for m in (8, 9)], list[int]()
    monkeypatch.setattr("tests.support.evaluators.require_launch", lambda *_: None)
    race = gpu.race

    def note(problem: Problem, *args: Any) -> Any:
        raced.append(problem.m)
        return race(problem, *args)

    monkeypatch.setattr(gpu, "race", note)
    pool: Any = SimpleNamespace(stream=lambda jobs: iter(list(jobs)))

    def keep(before: Record, after: Record) -> Support:
        assert raced[-1] == before.problem.m == after.problem.m
        return Support("no room") if before is stale[0] else SUPPORTED

    first, second = Repair([gpu], pool, OPTIONS, keep, print).repair(stale, stale, {})
    assert first == (stale[0], Support("no room")) and isinstance(second[1], Record)

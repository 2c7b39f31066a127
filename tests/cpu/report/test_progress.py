import dataclasses
from typing import Any

import pytest

from tests.support import DATA
from tests.support.nouns import Config, Patch, Problem, Record, Trial, cases, each
from tests.support.stores import CONFIG, ONE, TWO, record
from tritongemm.report import progress
from tritongemm.report.page.time_to_quality import QualityCurve, quality_over_time
from tritongemm.report.progress import KEPT, SEARCH, Progress, about
from tritongemm.results import history
from tritongemm.results.history import History, Tried

OURS = Config("tile", 16, 64, 64)


def raced(library_us: float) -> Record:
    return record(Problem(16, 64, 64), library="torch", library_seconds=library_us * 1e-6)


@pytest.fixture
def clock(monkeypatch: Patch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def begun(sizes: int, configs: int, seconds: float = 0.0) -> Progress:
    run = Progress(seconds)
    run.stage("plan", sizes)
    run.stage(SEARCH, configs)
    run.step("plan", sizes)
    run.stage("final", sizes)
    return run


def test_sizes_the_gain_and_the_time_left(clock: list[float]) -> None:
    """Searches are most of a size's time, so the estimate follows their configs, not only the sizes done."""
    run = begun(48, 4800)
    assert run.line() == "0 of 48 sizes", "no gain and no estimate yet"
    run.stage("compile", 2000)
    run.step("compile", 1500)
    run.step(SEARCH, 2400)
    clock[0] += 40.0
    assert run.line() == "0 of 48 sizes, about 60 s left (compiled 1,500 of 2,000)"
    run.finished(raced(12.0))
    run.finished(raced(10.0))
    run.finished(None)
    assert run.line(70) == "3 of 48 sizes, 1.10x torch so far, about 55 s left", "without what has no room"
    run.stage("plan", 1)
    run.stage("final", 1)
    run.trial(Trial(OURS, "ok", samples=(2e-6,), timer="events"))
    run.trial(Trial(OURS, "ok", samples=(3e-6,), timer="events"))
    assert run.line() == "0 of 1 size, best 2.00 us so far (planned 0 of 1)", "another run begins anew"


def test_the_limit_of_the_run_and_other_stages(clock: list[float]) -> None:
    run = begun(1, 100, seconds=30.0)
    run.step(SEARCH, 5)
    clock[0] += 20.0
    assert run.line() == "0 of 1 size, about 10 s left"
    run = Progress()
    run.stage("compile", 4)
    assert run.line() == "compiled 0 of 4"
    run.stage("verify", 8)
    run.step("verify", 2)
    clock[0] += 3600.0
    assert run.line() == "2 of 8 results verified, about 3 h left (compiled 0 of 4)"
    run.step("verify", 6)
    assert run.line() == "8 of 8 results verified (compiled 0 of 4)"


@cases(
    (1, 2646, 2646, "2,646 configs would take about 44 min to compile on 2 cores; --budget ends that earlier", 15.0),
    (1, 3040, 3040, "3,040 configs are compiled: about 51 min on 2 cores; --budget N", 0.0),
    (
        1,
        3040,
        64,
        "64 of 3,040 configs are compiled, the best predicted: about 65 s on 2 cores; --budget 0 compiles ",
        0.0,
    ),
    (2, 6080, 128, "128 of 6,080 configs are compiled, the best predicted of each size: about 2 min on 2 cores", 0.0),
    (1, 11, 11, "", 15.0),
)
def test_what_is_compiled_without_a_gpu_is_said(sizes: int, kept: int, tried: int, said: str, limit: float, /) -> None:
    run = begun(sizes, tried, seconds=limit)
    run.stage(KEPT, kept)
    lines = list(run.estimate(2))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


@each(("seconds", "words"), [(1, "5 s"), (88, "90 s"), (90, "2 min"), (7200, "2 h"), (2e5, "2 days")])
def test_times_are_round(seconds: float, words: str) -> None:
    assert about(seconds) == f"about {words}"


def tried(problem: Problem, number: int, microseconds: float, passed: float, **other: str) -> Tried:
    config = dataclasses.replace(CONFIG, group_m=number + 1)
    facts: dict[str, Any] = {"status": "ok", "samples": (microseconds * 1e-6,), **other}
    return Tried(problem, Trial(config, **facts), passed)


def reported(*candidates: Tried, library: float | None = None) -> History:
    return History({}, candidates, (record(ONE, 1e-5, library="torch", library_seconds=library),), 0.0, 0)


def points_of(curve: QualityCurve) -> tuple[Any, Any]:
    """What had passed at each point of a curve, and the quality from then on."""
    return [passed for passed, _ in curve.points], [quality for _, quality in curve.points]


def test_the_quality_over_time_of_what_was_tried_and_of_a_recorded_run() -> None:
    curve = quality_over_time(
        reported(tried(ONE, 0, 30, 1.0), tried(ONE, 1, 10, 2.0), tried(ONE, 2, 12, 3.0), library=2e-5)
    )
    assert points_of(curve) == ([0, 2, 3], pytest.approx([0.5, 1, 1]))
    assert curve.reached(0.99) == 2.0 and curve.reached(0.4) == 0.0
    assert curve.describe() == "99% of the final speed after 2.0 s"
    # Without a library's time a size counts from its first candidate on.
    curve = quality_over_time(reported(tried(ONE, 0, 40, 1.0), tried(TWO, 1, 5, 2.0), tried(ONE, 2, 10, 3.0)))
    assert points_of(curve) == ([1, 2, 3, 3], pytest.approx([0.25, 0.5, 1, 1])) and curve.reached(0.99) == 3.0
    race = tried(ONE, 1, 1, 4.0, status="wrong", stage="final")
    race = dataclasses.replace(race, trial=dataclasses.replace(race.trial, samples=()))
    curve = quality_over_time(reported(tried(ONE, 0, 20, 1.0), tried(ONE, 1, 1, 2.0), tried(ONE, 2, 10, 3.0), race))
    assert points_of(curve) == ([1, 3, 3], pytest.approx([0.5, 1, 1])) and curve.reached(0.99) == 3.0
    curve = quality_over_time(reported())
    assert curve.points == () and curve.reached(0.99) is None
    curve = quality_over_time(history.read(DATA / "h200_fp8_journal.jsonl"))
    assert curve.points[-1][1] == pytest.approx(1.0) and all(0 < quality <= 1 for _, quality in curve.points)
    assert 1 < (curve.reached(0.99) or 0) <= 76

"""What the line of progress says, and when."""

import pytest

from tests.support.tables import each
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.report import progress
from tritongemm.report.progress import KEPT, SEARCH, Progress, about

OURS = Config("tile", 16, 64, 64)


def record(us: float, library_us: float) -> Record:
    size = Problem(16, 64, 64)
    return Record(
        size, "sm90", OURS, "triton", us * 1e-6, 0.0, "events", library_seconds=library_us * 1e-6, library="torch"
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test changes."""
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
    run.finished(record(10.0, 12.0))
    run.finished(record(10.0, 10.0))
    run.finished(None)
    assert run.line(70) == "3 of 48 sizes, 1.10x torch so far, about 55 s left", "without what has no room"
    run.stage("plan", 1)
    run.stage("final", 1)
    run.trial(Trial(OURS, "ok", samples=(2e-6,), timer="events"))
    run.trial(Trial(OURS, "ok", samples=(3e-6,), timer="events"))
    assert run.line() == "0 of 1 size, best 2.00 us so far (planned 0 of 1)", "another run begins anew"


def test_the_limit_of_the_run_ends_it_sooner(clock: list[float]) -> None:
    run = begun(1, 100, seconds=30.0)
    run.step(SEARCH, 5)
    clock[0] += 20.0
    assert run.line() == "0 of 1 size, about 10 s left"


def test_other_stages_count_what_they_work_on(clock: list[float]) -> None:
    run = Progress()
    run.stage("compile", 4)
    assert run.line() == "compiled 0 of 4"
    run.stage("verify", 8)
    run.step("verify", 2)
    clock[0] += 3600.0
    assert run.line() == "2 of 8 results verified, about 3 h left (compiled 0 of 4)"


@each(
    ("sizes", "kept", "tried", "said"),
    [
        (1, 3040, 3040, "3,040 configs are compiled: about 51 min on 2 cores; --budget N"),
        (
            1,
            3040,
            64,
            "64 of 3,040 configs are compiled, the best predicted: about 65 s on 2 cores; --budget 0 compiles ",
        ),
        (2, 6080, 128, "128 of 6,080 configs are compiled, the best predicted of each size: about 2 min on 2 cores"),
        (1, 11, 11, ""),
    ],
)
def test_what_is_compiled_without_a_gpu_is_said_before(sizes: int, kept: int, tried: int, said: str) -> None:
    run = begun(sizes, tried)
    run.stage(KEPT, kept)
    lines = list(run.estimate(2))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


@each(("seconds", "words"), [(1, "5 s"), (88, "90 s"), (90, "2 min"), (7200, "2 h"), (2e5, "2 days")])
def test_times_are_round(seconds: float, words: str) -> None:
    assert about(seconds) == f"about {words}"

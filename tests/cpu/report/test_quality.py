"""Time to quality, from what a journal states."""

import dataclasses
from typing import Any

import pytest

from tests.support import DATA
from tests.support.stores import CONFIG, ONE, TWO, record
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.report.page.time_to_quality import QualityCurve, quality_over_time
from tritongemm.results import history
from tritongemm.results.history import History, Tried


def tried(problem: Problem, number: int, microseconds: float, passed: float, **other: str) -> Tried:
    config = dataclasses.replace(CONFIG, group_m=number + 1)
    facts: dict[str, Any] = {"status": "ok", "samples": (microseconds * 1e-6,), **other}
    return Tried(problem, Trial(config, **facts), passed)


def reported(*candidates: Tried, library: float | None = None) -> History:
    records = (record(ONE, 1e-5, library="torch", library_seconds=library),)
    return History({}, candidates, records, 0.0, 0)


def points_of(curve: QualityCurve) -> tuple[Any, Any]:
    """What had passed at each point of a curve, and the quality from then on."""
    return [passed for passed, _ in curve.points], [quality for _, quality in curve.points]


def test_the_library_serves_until_there_is_a_candidate() -> None:
    curve = quality_over_time(
        reported(tried(ONE, 0, 30, 1.0), tried(ONE, 1, 10, 2.0), tried(ONE, 2, 12, 3.0), library=2e-5)
    )
    assert points_of(curve) == ([0, 2, 3], pytest.approx([0.5, 1, 1]))
    assert curve.reached(0.99) == 2.0 and curve.reached(0.4) == 0.0
    assert curve.describe() == "99% of the final speed after 2.0 s"


def test_sizes_count_by_their_geometric_mean() -> None:
    """Without a library's time a size counts from its first candidate on."""
    curve = quality_over_time(reported(tried(ONE, 0, 40, 1.0), tried(TWO, 1, 5, 2.0), tried(ONE, 2, 10, 3.0)))
    assert points_of(curve) == ([1, 2, 3, 3], pytest.approx([0.25, 0.5, 1, 1]))
    assert curve.reached(0.99) == 3.0


def test_a_candidate_that_proves_wrong_never_counts() -> None:
    race = tried(ONE, 1, 1, 4.0, status="wrong", stage="final")
    race = dataclasses.replace(race, trial=dataclasses.replace(race.trial, samples=()))
    curve = quality_over_time(reported(tried(ONE, 0, 20, 1.0), tried(ONE, 1, 1, 2.0), tried(ONE, 2, 10, 3.0), race))
    assert points_of(curve) == ([1, 3, 3], pytest.approx([0.5, 1, 1])) and curve.reached(0.99) == 3.0


def test_the_quality_of_a_recorded_run() -> None:
    curve = quality_over_time(history.read(DATA / "h200_fp8_journal.jsonl"))
    assert curve.points[-1][1] == pytest.approx(1.0)
    assert all(0 < quality <= 1 for _, quality in curve.points)
    assert 1 < (curve.reached(0.99) or 0) <= 76


def test_nothing_timed_has_no_curve() -> None:
    curve = quality_over_time(reported())
    assert curve.points == () and curve.reached(0.99) is None

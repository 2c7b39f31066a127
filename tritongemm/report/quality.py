"""Measures how near the best candidates so far were to the best at the end, while runs were under way."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log

from tritongemm.core.problem import Problem
from tritongemm.results.history import History

GOAL = 0.99  # of the speed at the end, to which the time is measured
_LEAST_STEP = 2e-4  # of quality between two points of a curve, which is drawn


@dataclass(frozen=True)
class QualityCurve:
    """Time to quality of the runs of one journal.

    Attributes:
        points: the seconds that had passed, and the quality from then on: the geometric mean over all sizes of the
            best time at the end over the best time so far, by screening's times. Until a size has a candidate the
            library serves it; one without a library's time counts from its first candidate on.
    """

    points: tuple[tuple[float, float], ...]

    def reached(self, quality: float) -> float | None:
        """Return the seconds that had passed when a quality was reached for good; None where it never was."""
        found = None
        for passed, value in reversed(self.points):
            if value < quality:
                break
            found = passed
        return found

    def describe(self) -> str:
        """Return a phrase that says when the goal was reached."""
        passed = self.reached(GOAL)
        if passed is None:
            return f"{GOAL:.0%} of the final speed was not reached"
        return f"{GOAL:.0%} of the final speed after {passed:.1f} s"


def quality_over_time(history: History) -> QualityCurve:
    """Return the time to quality of the runs of a journal; without points where no candidate was timed."""
    timed = list(_timed(history))
    problems = {problem for problem, _, _ in timed}
    library = {record.problem: record.library_seconds for record in history.records}
    served = {p: seconds for p, seconds in library.items() if seconds is not None and p in problems}
    best = dict(served)
    for problem, seconds, _ in timed:
        best[problem] = min(seconds, best.get(problem, seconds))
    lost = sum(log(served[problem] / best[problem]) for problem in served)
    points = [(0.0, exp(-lost / len(served)))] if served else []
    for problem, seconds, passed in timed:
        before = served.get(problem)
        if before is not None and before <= seconds:
            continue
        served[problem] = seconds
        lost += log(seconds / before) if before is not None else log(seconds / best[problem])
        quality = exp(-max(lost, 0.0) / len(served))
        if not points or abs(quality - points[-1][1]) >= _LEAST_STEP:
            points.append((passed, quality))
    if timed:
        points.append((timed[-1][2], exp(-max(lost, 0.0) / len(served))))
    return QualityCurve(tuple(points))


def _timed(history: History) -> Iterator[tuple[Problem, float, float]]:
    """Problem and time of each candidate that was timed and not found wrong later, and the seconds that had passed."""
    refuted = {(tried.problem, tried.trial.config) for tried in history.tried if tried.trial.status != "ok"}
    for tried in history.tried:
        trial = tried.trial
        if trial.samples and trial.stage == "screen" and (tried.problem, trial.config) not in refuted:
            yield tried.problem, trial.seconds, tried.seconds

"""Figure: how near the best so far was to the best at the end, over the seconds of the run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any

from tritongemm.core.problem import Problem
from tritongemm.report.page.figure import COLOURS, SHARES, Figure, axis, number, plain
from tritongemm.report.page.report_data import ReportData
from tritongemm.results.history import History

_TITLE = "Time to quality"
GOAL = 0.99  # of the speed at the end, to which the time is measured


@dataclass(frozen=True)
class QualityCurve:
    """Time to quality of the runs of one journal."""

    # The seconds that had passed, and the quality from then on: the geometric mean over all sizes of the best time at
    # the end over the best time so far, by screening's times. Until a size has a candidate the library serves it; one
    # without a library's time counts from its first candidate on.
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


def curves_of(data: ReportData) -> dict[str, QualityCurve]:
    """Return the time to quality of each journal in which anything was timed."""
    curves = {name: quality_over_time(history) for name, history in data.histories.items()}
    return {name: curve for name, curve in curves.items() if curve.points}


def draw(data: ReportData) -> Figure:
    """Draw a line for each journal: the share of the final speed that was reached by each second."""
    if not data.histories:
        return Figure("quality", _TITLE, "Not drawn: these results have no journal.")
    curves = curves_of(data)
    if not curves:
        return Figure("quality", _TITLE, "Not drawn: nothing was timed in these journals.")
    caption = "Geometric mean over all sizes of the speed of the best candidate so far, before it the library's, "
    caption += "over that of the best at the end. " + "; ".join(f"{n}: {c.describe()}" for n, c in curves.items()) + "."
    layout = {
        "xaxis": axis("seconds since the run began", rangemode="tozero"),
        "yaxis": axis("share of the final speed", tickformat=SHARES),
        "showlegend": True,
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": GOAL, "y1": GOAL,
                    "line": {"color": "rgba(128,128,128,0.7)", "width": 1, "dash": "dot"}}],
    }  # fmt: skip
    return Figure("quality", _TITLE, caption, tuple(_lines(curves.items())), layout)


def _lines(curves: Iterable[tuple[str, QualityCurve]]) -> Iterable[Mapping[str, Any]]:
    for place, (name, curve) in enumerate(curves):
        yield {
            "type": "scatter",
            "mode": "lines",
            "name": plain(name),
            "line": {"shape": "hv", "color": COLOURS[place % len(COLOURS)], "width": 2},
            "x": [number(passed) for passed, _ in curve.points],
            "y": [number(quality) for _, quality in curve.points],
            "hovertemplate": "%{y:.2%} after %{x:.4g} s",
        }


_LEAST_STEP = 2e-4  # of quality between two points of a curve, which is drawn

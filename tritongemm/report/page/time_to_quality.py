"""Figure: how near the best so far was to the best at the end, over the seconds of the run."""

from collections.abc import Iterable, Mapping
from typing import Any

from tritongemm.report.page.figure import COLOURS, SHARES, Figure, number, plain
from tritongemm.report.page.report_data import ReportData
from tritongemm.report.quality import GOAL, QualityCurve, quality_over_time

_TITLE = "Time to quality"


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
        "xaxis": {"title": {"text": "seconds since the run began"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "share of the final speed"}, "tickformat": SHARES},
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

"""Figure: which kernel serves which M of each table over M."""

from collections.abc import Iterable
from itertools import groupby

from tritongemm.core.record import Record
from tritongemm.report.page.figure import Figure, log_axis, plain
from tritongemm.report.page.report_data import ReportData, name_product
from tritongemm.report.page.winners import colours_of, served_by

_TITLE = "Ranges of M and their winners"
_ROW_PIXELS = 30


def draw(data: ReportData) -> Figure:
    """Draw a row for each table over M, with a bar for each run of M that one config serves."""
    ranged = [record for record in data.records if record.m_from]
    if not ranged:
        return Figure("ranges", _TITLE, "Not drawn: no result is a row of a table over M (--m_range, --workload).")
    tables = data.busiest(ranged)
    left_out = len({name_product(record) for record in ranged}) - len(tables)
    spans = [span for span in _spans(ranged) if span[0] in tables]
    traces = []
    for kind, colour in colours_of(data).items():
        of_kind = [span for span in spans if served_by(span[3]) == kind]
        if not of_kind:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(kind),
                "marker": {"color": colour, "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}},
                "y": [plain(product) for product, *_ in of_kind],
                "base": [first for _, first, _, _ in of_kind],
                "x": [last + 1 - first for _, first, last, _ in of_kind],
                "text": [f"M {f} to {last}: {plain(r.config.short_name)}" for _, f, last, r in of_kind],
                "textposition": "none",
                "hovertemplate": "%{y}<br>%{text}<extra>%{fullData.name}</extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "xaxis": log_axis("M"),
        "yaxis": {"type": "category", "automargin": True, "categoryorder": "array",
                  "categoryarray": [plain(product) for product in reversed(tables)]},
    }  # fmt: skip
    caption = f"{len(tables)} table{'s' * (len(tables) != 1)} over M. A bar is a run of M that one config serves."
    caption += f" Left out are those that take less time: {left_out}." if left_out else ""
    return Figure("ranges", _TITLE, caption, tuple(traces), layout, 170 + _ROW_PIXELS * len(tables))


def _spans(records: Iterable[Record]) -> Iterable[tuple[str, int, int, Record]]:
    """Yield the product, first and last M, and one result of each run of neighbours that the same config serves."""
    ordered = sorted(records, key=lambda r: (name_product(r), r.problem.m))
    for (product, _, _), group in groupby(ordered, key=lambda r: (name_product(r), r.winner, r.config)):
        of_span = list(group)
        yield product, of_span[0].m_from, of_span[-1].problem.m, of_span[0]

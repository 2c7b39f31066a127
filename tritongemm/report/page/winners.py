"""Figure: whose kernels serve how many of the sizes, by backend and template."""

from collections import Counter

from tritongemm.core.record import Record
from tritongemm.report.page.figure import FLOOR, Figure, colours, number, plain
from tritongemm.report.page.report_data import ReportData

_TITLE = "Share won by backend and template"
_MOST_TEMPLATES = 24  # Others are drawn as one.
_OTHERS = "other templates"


def served_by(record: Record) -> str:
    """Return the backend and template that serve a size; of a kernel that is not generated, the backend alone."""
    if record.winner == record.library and record.library_seconds is not None:
        return record.winner
    config = record.config
    return f"{config.backend}: {config.template}" if config.is_generated else record.winner


def colours_of(data: ReportData) -> dict[str, str]:
    """Return a colour for each kind of what serves, in all figures, the most frequent kinds first."""
    return colours(kind for kind, _ in Counter(map(served_by, data.records)).most_common())


def draw(data: ReportData) -> Figure:
    """Draw a bar for each backend: the percentage of the sizes that each of its templates serves."""
    shades = colours_of(data)
    counts = Counter((record.winner, served_by(record)) for record in data.records)
    kept = dict(counts.most_common(_MOST_TEMPLATES))
    for backend, kind in counts.keys() - kept.keys():
        kept[backend, _OTHERS] = kept.get((backend, _OTHERS), 0) + counts[backend, kind]
    backends = [name for name, _ in Counter(record.winner for record in data.records).most_common()]
    total = len(data.records)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(kind),
            "marker": {"color": shades.get(kind, FLOOR), "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}},
            "y": [plain(backend)],
            "x": [number(100 * count / total)],
            "text": [f"{count} of {total} sizes"],
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{x:.1f} %<extra>%{fullData.name}</extra>",
        }
        for (backend, kind), count in sorted(kept.items(), key=lambda item: -item[1])
    ]
    ties = sum(record.tie for record in data.raced)
    caption = f"Sizes that each backend serves, of {total}."
    caption += f" {ties} of {len(data.raced)} that raced with the library are ties." if data.raced else ""
    layout = {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": "% of the sizes"}, "range": [0, 100]},
        "yaxis": {"type": "category", "automargin": True, "categoryorder": "array",
                  "categoryarray": [plain(name) for name in reversed(backends)]},
    }  # fmt: skip
    return Figure("winners", _TITLE, caption, tuple(traces), layout, 200 + 40 * len(backends))

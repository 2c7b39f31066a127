"""Figures: which kernels serve, by backend and template and by ranges of M, and what ranges lose at M held out."""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import numpy as np

from tritongemm.core.record import Record
from tritongemm.report.page.figure import (
    EDGE,
    FLOOR,
    SHARES,
    WORSE,
    Figure,
    axis,
    bars,
    colours,
    log_axis,
    marks,
    names_axis,
    number,
    plain,
)
from tritongemm.report.page.report_data import ReportData, name_product

_WON, _RANGES, _REGRET = "Share won by backend and template", "Ranges of M and their winners", "Regret at held-out M"
_MOST_TEMPLATES = 24  # Others are drawn as one.
_OTHERS = "other templates"
_LEAST_TOP = 0.05  # of the axis of regret


def served_by(record: Record) -> str:
    """Return the backend and template that serve a size; of a kernel that is not generated, the backend alone."""
    if record.winner == record.library and record.library_seconds is not None:
        return record.winner
    config = record.config
    return f"{config.backend}: {config.template}" if config.is_generated else record.winner


def colours_of(data: ReportData) -> dict[str, str]:
    """Return a colour for each kind of what serves, in all figures, the most frequent kinds first."""
    return colours(kind for kind, _ in Counter(map(served_by, data.records)).most_common())


def draw_won(data: ReportData) -> Figure:
    """Draw a bar for each backend: the percentage of the sizes that each of its templates serves."""
    shades = colours_of(data)
    counts = Counter((record.winner, served_by(record)) for record in data.records)
    kept = dict(counts.most_common(_MOST_TEMPLATES))
    for backend, kind in counts.keys() - kept.keys():
        kept[backend, _OTHERS] = kept.get((backend, _OTHERS), 0) + counts[backend, kind]
    backends = [name for name, _ in Counter(record.winner for record in data.records).most_common()]
    total = len(data.records)
    traces = [
        bars(plain(kind), {"color": shades.get(kind, FLOOR), "line": EDGE}, [plain(backend)],
             [number(100 * count / total)], text=[f"{count} of {total} sizes"],
             hovertemplate="%{text}<br>%{x:.1f} %<extra>%{fullData.name}</extra>")
        for (backend, kind), count in sorted(kept.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    ties = sum(record.tie for record in data.raced)
    caption = f"Sizes that each backend serves, of {total}."
    caption += f" {ties} of {len(data.raced)} that raced with the library are ties." if data.raced else ""
    axes = {"xaxis": axis("% of the sizes", range=[0, 100]), "yaxis": names_axis(backends)}
    layout = {"barmode": "stack", "legend": {"traceorder": "normal"}, **axes}
    return Figure("winners", _WON, caption, tuple(traces), layout, 200 + 40 * len(backends))


def draw_ranges(data: ReportData) -> Figure:
    """Draw a row for each table over M, with a bar for each run of M that one config serves."""
    ranged = [record for record in data.records if record.m_from]
    if not ranged:
        return Figure("ranges", _RANGES, "Not drawn: no result is a row of a table over M (--m_range, --workload).")
    tables = data.busiest(ranged)
    left_out = len({name_product(record) for record in ranged}) - len(tables)
    spans = [span for span in _spans(ranged) if span[0] in tables]
    traces = []
    for kind, colour in colours_of(data).items():
        of_kind = [span for span in spans if served_by(span[3]) == kind]
        if of_kind:
            traces.append(
                bars(plain(kind), {"color": colour, "line": EDGE}, [plain(product) for product, *_ in of_kind],
                     [last + 1 - first for _, first, last, _ in of_kind], base=[first for _, first, _, _ in of_kind],
                     text=[f"M {f} to {last}: {plain(r.config.short_name)}" for _, f, last, r in of_kind],
                     hovertemplate="%{y}<br>%{text}<extra>%{fullData.name}</extra>")
            )  # fmt: skip
    layout = {"barmode": "overlay", "xaxis": log_axis("M"), "yaxis": names_axis(tables)}
    caption = f"{len(tables)} table{'s' * (len(tables) != 1)} over M. A bar is a run of M that one config serves."
    caption += f" Left out are those that take less time: {left_out}." if left_out else ""
    return Figure("ranges", _RANGES, caption, tuple(traces), layout, 170 + 30 * len(tables))


def _spans(records: Iterable[Record]) -> Iterable[tuple[str, int, int, Record]]:
    """Yield the product, first and last M, and one result of each run of neighbours that the same config serves."""
    ordered = sorted(records, key=lambda r: (name_product(r), r.problem.m))
    for (product, _, _), group in groupby(ordered, key=lambda r: (name_product(r), r.winner, r.config)):
        of_span = list(group)
        yield product, of_span[0].m_from, of_span[-1].problem.m, of_span[0]


def draw_regret(data: ReportData) -> Figure:
    """Draw the regret at each M that was held out: a part of the best known time there."""
    seen = [
        (int(m), float(regret), name_product(record))
        for record in data.records
        for m, (regret, _) in record.held_out.items()
    ]
    if not seen:
        return Figure("regret", _REGRET, "Not drawn: no result has M that were held out.")
    regrets = np.array([regret for _, regret, _ in seen])
    caption = (
        f"Time at {len(seen)} M that had no part in choosing the row that serves them, over the best known there, less "
        f"1: {regrets.mean():.1%} on average, {np.percentile(regrets, 90):.1%} at the 90th percentile, "
        f"{regrets.max():.1%} at worst."
    )
    trace = marks(
        {"color": WORSE, "size": 8, "opacity": 0.7},
        [m for m, _, _ in seen],
        [number(regret) for _, regret, _ in seen],
        text=[plain(product) for _, _, product in seen],
        hovertemplate="M %{x}, %{text}<br>%{y:.2%}<extra></extra>",
    )
    top = max(_LEAST_TOP, 1.05 * regrets.max())
    regret_axis = axis("regret", tickformat=SHARES, range=[-0.03 * top, top])
    layout = {"xaxis": log_axis("M"), "yaxis": regret_axis, "hovermode": "closest"}
    return Figure("regret", _REGRET, caption, (trace,), layout)

"""Figure: where the time of the library's calls goes when tuned kernels serve them, product by product."""

from itertools import accumulate

from tritongemm.report.page.figure import FLOOR, OURS, WORSE, Figure, number, plain
from tritongemm.report.page.report_data import ReportData, name_product, uplift_of

_TITLE = "Weighted uplift"
_MOST_STEPS = 16  # products with a step of their own
_ROW_PIXELS = 26


def draw(data: ReportData) -> Figure:
    """Draw the library's milliseconds of all calls, what each product saves or costs of them, and what remains."""
    uplift = uplift_of(data)
    if uplift is None:
        why = "nothing of the workload" if data.calls and data.raced else "no result"
        return Figure("uplift", _TITLE, f"Not drawn: {why} has a time of the library beside ours.")
    theirs = sum(data.weight(record) * (record.library_seconds or 0.0) for record in data.raced)
    gains = _gains(data)
    steps = sorted(gains.items(), key=lambda item: -abs(item[1]))
    shown, others = steps[:_MOST_STEPS], steps[_MOST_STEPS:]
    if others:
        shown.append((f"{len(others)} others", sum(gain for _, gain in others)))
    ours = theirs + sum(gains.values())
    names = ["library", *(plain(product) for product, _ in shown), "tuned"]
    trace = {
        "type": "waterfall",
        "orientation": "h",
        "y": names,
        "x": [number(theirs * 1e3), *(number(gain * 1e3) for _, gain in shown), number(ours * 1e3)],
        "measure": ["absolute", *("relative" for _ in shown), "total"],
        "text": ["100 %", *(f"{gain / theirs:+.2%}" for _, gain in shown), f"{ours / theirs:.1%}"],
        "hovertemplate": "%{y}<br>%{x:.4g} ms<br>%{text} of the library's time<extra></extra>",
        "decreasing": {"marker": {"color": OURS}},
        "increasing": {"marker": {"color": WORSE}},
        "totals": {"marker": {"color": FLOOR}},
        "connector": {"line": {"width": 1, "color": "rgba(128,128,128,0.6)"}},
    }
    levels = list(accumulate((gain for _, gain in shown), initial=theirs))
    layout = {
        "xaxis": {"title": {"text": "ms of all calls"},
                  "range": [number(min(levels) * 0.9e3), number(max(levels) * 1.02e3)]},
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed", "showgrid": False},
        "showlegend": False,
    }  # fmt: skip
    how = "each size called once, as no workload was named"
    if data.calls:
        how = "weighed by the workload's calls, those within a range of M at the time of its largest"
    caption = (
        f"Time of the library, what each product gains or loses, and the time of what serves; {how}. "
        f"{uplift.weighted:.2%} of the time is saved; the ratios less 1 are {uplift.average:.2%} on average and "
        f"{uplift.geometric:.2%} by the geometric mean. The axis does not begin at 0."
    )
    return Figure("uplift", _TITLE, caption, (trace,), layout, 130 + _ROW_PIXELS * len(names))


def _gains(data: ReportData) -> dict[str, float]:
    """Return the seconds that all calls of each product take more than the library's; below 0 where they take less."""
    gains = dict[str, float]()
    for record in data.raced:
        product = name_product(record)
        more = record.served_seconds - (record.library_seconds or 0.0)
        gains[product] = gains.get(product, 0.0) + data.weight(record) * more
    return gains

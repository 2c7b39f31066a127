"""Figure: the library's time over ours by M and by N x K, as a heat map."""

from math import log2

from tritongemm.report.page.figure import LIBRARY, OURS, Figure, number, plain
from tritongemm.report.page.report_data import ReportData, name_product

_TITLE = "Gain by layer and M"
_ALL = "all of them"  # the first row
_ROW_PIXELS = 24
_LEAST_SPAN, _MOST_SPAN = 0.1, 1.0  # of log2 of the ratio, to either side of 1; beyond it colours are the same


def draw(data: ReportData) -> Figure:
    """Draw a cell for each product and M: the library's time over that of our best candidate."""
    if not data.raced:
        return Figure("ratios", _TITLE, "Not drawn: no result has a time of the library beside ours.")
    products = data.busiest(data.raced)[::-1]
    left_out = len({name_product(r) for r in data.raced}) - len(products)
    ratios = {(name_product(r), r.problem.m): r.speedup or 1.0 for r in data.raced}
    ratios = {place: ratio for place, ratio in ratios.items() if place[0] in products}
    sizes = sorted({m for _, m in ratios})
    if len(products) > 1 and len(data.devices) == 1:
        products = (*products, _ALL)
        ratios |= {(_ALL, m): data.predicted_gain(m) or 1.0 for m in sizes}
    logs = {place: number(log2(ratio)) for place, ratio in ratios.items()}
    span = min(_MOST_SPAN, max(_LEAST_SPAN, *(abs(value) for value in logs.values() if value is not None)))
    ticks = [-span, -span / 2, 0.0, span / 2, span]
    trace = {
        "type": "heatmap",
        "x": [str(m) for m in sizes],
        "y": [plain(data.label(product)) for product in products],
        "z": [[logs.get((product, m)) for m in sizes] for product in products],
        "text": [[_two_digits(ratios.get((product, m))) for m in sizes] for product in products],
        "texttemplate": "%{text}" if len(sizes) <= 16 else "",
        "hovertemplate": "M %{x}, %{y}<br>ratio %{text}<extra></extra>",
        "hoverongaps": False,
        "zmin": -span,
        "zmax": span,
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[0, LIBRARY], [0.5, "#b4bac1"], [1, OURS]],
        "colorbar": {"title": {"text": "ratio"}, "tickvals": ticks, "ticktext": [f"{2**t:.2f}" for t in ticks]},
    }
    layout = {
        "xaxis": {"title": {"text": "M"}, "type": "category", "showgrid": False},
        "yaxis": {"type": "category", "automargin": True, "showgrid": False},
    }
    caption = "The library's time over that of our best candidate: blue where ours is faster, orange where the library "
    caption += "is, and serves. Empty where nothing was raced."
    if _ALL in products:
        caption += " The first row is the library's time of all products over that of what serves them at this M, "
        caption += "as often as the workload calls them." if data.calls else "each once, as no workload was named."
    caption += f" {left_out} products that take less time are left out." if left_out else ""
    return Figure("ratios", _TITLE, caption, (trace,), layout, 160 + _ROW_PIXELS * len(products))


def _two_digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"

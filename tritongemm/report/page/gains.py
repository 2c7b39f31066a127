"""Figures: what tuned kernels gain over the library, by layer and M and product by product, and what is left."""

from collections.abc import Sequence
from itertools import accumulate
from math import log2

from tritongemm.core.record import Record
from tritongemm.report.page import figure
from tritongemm.report.page.figure import EDGE, FLOOR, LIBRARY, OURS, WORSE, Figure, axis, names_axis, number, plain
from tritongemm.report.page.report_data import ReportData, name_product, served_sizes, uplift_of

_RATIOS, _UPLIFT, _LEFT = "Gain by layer and M", "Weighted uplift", "Left to the floor"
_ALL = "all of them"  # the first row of the ratios
_LEAST_SPAN, _MOST_SPAN = 0.1, 1.0  # of log2 of the ratio, to either side of 1; beyond it colours are the same
_MOST_COLUMNS = 32
_MOST_STEPS = 16  # products with a step or bar of their own


def draw_ratios(data: ReportData) -> Figure:
    """Draw a cell for each product and M: the library's time over that of our best candidate."""
    if not data.raced:
        return Figure("ratios", _RATIOS, "Not drawn: no result has a time of the library beside ours.")
    products = data.busiest(data.raced)[::-1]
    left_out = len({name_product(r) for r in data.raced}) - len(products)
    shown = [r for r in data.raced if name_product(r) in products]
    sizes = _columns(shown)
    exact_last = sorted(shown, key=lambda r: r.m_from == 0)
    ratios = {(name_product(r), m): r.speedup or 1.0 for r in exact_last for m in served_sizes(r, sizes)}
    if len(products) > 1 and len(data.devices) == 1:
        products = (*products, _ALL)
        together = data.predicted_gains(sizes)
        ratios |= {(_ALL, m): together.get(m, 1.0) for m in sizes}
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
    layout = {"xaxis": axis("M", type="category", showgrid=False), "yaxis": names_axis(showgrid=False)}
    caption = "The library's time over that of our best candidate: blue where ours is faster, orange where the library "
    caption += "is, and serves. Empty where nothing was raced; a range has the ratio at its largest M."
    if _ALL in products:
        caption += " The first row is the library's time of all products over that of what serves them at this M, "
        caption += "as often as the workload calls them." if data.calls else "each once, as no workload was named."
    caption += f" {left_out} products that take less time are left out." if left_out else ""
    return Figure("ratios", _RATIOS, caption, (trace,), layout, 160 + 24 * len(products))


def _columns(records: Sequence[Record]) -> list[int]:
    """Return the M that have a column: all, or powers of two where ranges end at more of them than can be read."""
    sizes = {r.problem.m for r in records}
    ranges = [r.m_from for r in records if r.m_from]
    if len(sizes) <= _MOST_COLUMNS or 2 * len(ranges) < len(records):
        return sorted(sizes)
    return [1 << bits for bits in range(max(sizes).bit_length()) if 1 << bits >= min(ranges)]


def _two_digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def draw_uplift(data: ReportData) -> Figure:
    """Draw the library's milliseconds of all calls, what each product saves or costs of them, and what remains."""
    uplift = uplift_of(data)
    if uplift is None:
        why = "nothing of the workload" if data.calls and data.raced else "no result"
        return Figure("uplift", _UPLIFT, f"Not drawn: {why} has a time of the library beside ours.")
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
        "connector": {"line": EDGE},
    }
    levels = list(accumulate((gain for _, gain in shown), initial=theirs))
    layout = {
        "xaxis": axis("ms of all calls", range=[number(min(levels) * 0.9e3), number(max(levels) * 1.02e3)]),
        "yaxis": names_axis(autorange="reversed", showgrid=False),
        "showlegend": False,
    }
    how = "each size called once, as no workload was named"
    if data.calls:
        how = "weighed by the workload's calls, those within a range of M at the time of its largest"
    caption = (
        f"Time of the library, what each product gains or loses, and the time of what serves; {how}. "
        f"{uplift.weighted:.2%} of the time is saved; the ratios less 1 are {uplift.average:.2%} on average and "
        f"{uplift.geometric:.2%} by the geometric mean. The axis does not begin at 0."
    )
    return Figure("uplift", _UPLIFT, caption, (trace,), layout, 130 + 26 * len(names))


def _gains(data: ReportData) -> dict[str, float]:
    """Return the seconds that all calls of each product take more than the library's; below 0 where they take less."""
    gains = dict[str, float]()
    for record in data.raced:
        product = name_product(record)
        more = record.served_seconds - (record.library_seconds or 0.0)
        gains[product] = gains.get(product, 0.0) + data.weight(record) * more
    return gains


def draw_left(data: ReportData) -> Figure:
    """Draw a bar for each product: milliseconds of its calls at the floor, and above it."""
    times: dict[str, tuple[float, float]] = {}
    for record in data.records:
        floor, calls = data.floor_seconds(record), data.weight(record)
        if floor is not None and calls:
            served, floors = times.get(name_product(record), (0.0, 0.0))
            shortest = min(floor, record.served_seconds)
            times[name_product(record)] = served + calls * record.served_seconds, floors + calls * shortest
    if not times:
        return Figure("left", _LEFT, "Not drawn: no facts of these devices are known, so there is no floor.")
    shown = sorted(times, key=lambda product: times[product][1] - times[product][0])[:_MOST_STEPS][::-1]
    names = [plain(data.label(product)) for product in shown]
    parts = {"floor": [times[p][1] for p in shown], "above it": [times[p][0] - times[p][1] for p in shown]}
    traces = tuple(
        figure.bars(
            name, {"color": colour}, names, [number(value * 1e3) for value in values],
            text=[f"{value / times[p][0]:.1%} of its time" for p, value in zip(shown, values, strict=True)],
            hovertemplate="%{y}<br>%{x:.4g} ms, %{text}<extra>" + name + "</extra>")
        for (name, values), colour in zip(parts.items(), (FLOOR, OURS), strict=True)
    )  # fmt: skip
    served, floors = (sum(each) for each in zip(*times.values(), strict=True))
    how = "as often as the workload calls them" if data.calls else "each size once, as no workload was named"
    caption = (
        f"Time of what serves, {how}: {floors / served:.1%} of it is the floor, so no kernel saves more than "
        f"{1 - floors / served:.1%}. The floor is the longer of what the data sheet allows and the shortest kernel "
        "seen on the device; products with most above it come first."
    )
    caption += f" {len(times) - len(shown)} others are left out." if len(times) > len(shown) else ""
    axes = {"xaxis": axis("ms of all calls"), "yaxis": names_axis(showgrid=False)}
    layout = {"barmode": "stack", "legend": {"traceorder": "normal"}, **axes}
    return Figure("left", _LEFT, caption, traces, layout, 150 + 26 * len(names))

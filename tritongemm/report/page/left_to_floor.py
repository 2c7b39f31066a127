"""Figure: the time of each product's calls, split into its floor and what is above it."""

from tritongemm.report.page.figure import FLOOR, OURS, Figure, number, plain
from tritongemm.report.page.report_data import ReportData, name_product

_TITLE = "Left to the floor"
_MOST_PRODUCTS = 16
_ROW_PIXELS = 26


def draw(data: ReportData) -> Figure:
    """Draw a bar for each product: milliseconds of its calls at the floor, and above it."""
    times: dict[str, tuple[float, float]] = {}
    for record in data.records:
        floor, calls = data.floor_seconds(record), data.weight(record)
        if floor is not None and calls:
            served, floors = times.get(name_product(record), (0.0, 0.0))
            shortest = min(floor, record.served_seconds)
            times[name_product(record)] = served + calls * record.served_seconds, floors + calls * shortest
    if not times:
        return Figure("left", _TITLE, "Not drawn: no facts of these devices are known, so there is no floor.")
    shown = sorted(times, key=lambda product: times[product][1] - times[product][0])[:_MOST_PRODUCTS][::-1]
    names = [plain(data.label(product)) for product in shown]
    parts = {"floor": [times[p][1] for p in shown], "above it": [times[p][0] - times[p][1] for p in shown]}
    traces = tuple(
        {
            "type": "bar", "orientation": "h", "name": name, "marker": {"color": colour}, "y": names,
            "x": [number(value * 1e3) for value in values],
            "text": [f"{value / times[p][0]:.1%} of its time" for p, value in zip(shown, values, strict=True)],
            "textposition": "none", "hovertemplate": "%{y}<br>%{x:.4g} ms, %{text}<extra>" + name + "</extra>",
        }
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
    layout = {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": "ms of all calls"}},
        "yaxis": {"type": "category", "automargin": True, "showgrid": False},
    }
    return Figure("left", _TITLE, caption, traces, layout, 150 + _ROW_PIXELS * len(names))

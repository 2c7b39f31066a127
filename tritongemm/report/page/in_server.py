"""Figure: how much faster a server is with a table, load by load, and what the rows predict."""

from statistics import median

from tritongemm.report.page.figure import COLOURS, WORSE, Figure, axis, bars, marks, names_axis, number, plain
from tritongemm.results.server_comparison import QUANTITIES, ServerComparison
from tritongemm.system.printable import printable

_SHOWN = {"step_ms": "step time", "ttft_ms": "time to first token", "tokens_per_s": "throughput"}
_ROW_PIXELS = 78


def draw(comparison: ServerComparison) -> Figure:
    """Draw the gain of each load with the least and the most of all pairs of starts, and the rows' own prediction."""
    loads = comparison.loads
    names, traces = [plain(load.name) for load in loads], []
    for (quantity, words), colour in zip(_SHOWN.items(), COLOURS, strict=False):
        found = [next(one for one in load.quantities if one.name == quantity) for load in loads]
        gains = [one.gain for one in found]
        whiskers = {"array": [number(g.most - g.ratio) for g in gains],
                    "arrayminus": [number(g.ratio - g.least) for g in gains]}  # fmt: skip
        traces.append(
            bars(words, {"color": colour}, names, [number(gain.ratio - 1) for gain in gains], base=[1.0] * len(names),
                 error_x={"type": "data", "symmetric": False, **whiskers},
                 text=[f"{median(o.without):.4g} to {median(o.served):.4g} {QUANTITIES[quantity]}" for o in found],
                 hovertemplate="%{y}<br>%{text}<extra>" + words + "</extra>")
        )  # fmt: skip
    said = [load for load in loads if load.predicted]
    marker = {"color": WORSE, "symbol": "line-ns-open", "size": 22, "line": {"width": 3}}
    traces.append(
        marks(marker, [number(load.predicted) for load in said], [plain(load.name) for load in said],
              name="rows predict, products alone", hovertemplate="%{y}: %{x:.3f}<extra>rows predict</extra>")
    )  # fmt: skip
    axes = {"xaxis": axis("times faster with the table"), "yaxis": names_axis(autorange="reversed")}
    layout = {"barmode": "group", **axes}
    noises = [one.noise or 0.0 for load in loads for one in load.quantities if one.name == "step_ms"]
    starts = max(len(one.without) for load in loads for one in load.quantities)
    apart = f"Step times of starts without the table are up to {max(noises):.1%} apart. " if starts > 1 else ""
    caption = (
        f"{comparison.model} in its server without and with {comparison.table}; starts of each, in turn: {starts}. A "
        f"bar is the median of all pairs of starts, its whisker goes from the least to the most of them. {apart}"
    )
    caption += "".join(f"Greedy tokens, {name}: {agreement}. " for name, agreement in comparison.agreement.items())
    caption += f"Served: {'; '.join(comparison.served) or 'the log does not say'}."
    height = 150 + _ROW_PIXELS * len(names)
    return Figure("server", "Before and after in the server", printable(caption), tuple(traces), layout, height)

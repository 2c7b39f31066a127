"""Figure: the rate of every size over its operations per byte, with the library's, the floor and the roof."""

from collections.abc import Iterable, Sequence
from typing import Any

from tritongemm.core.record import Record
from tritongemm.report.page.figure import FLOOR, LIBRARY, OURS, Figure, log_axis, marks, number, plain
from tritongemm.report.page.report_data import ReportData, device_of

_TITLE = "Sizes under the roofline"
_MOST_SIZES = 1500  # as browsers draw thousands of marks slowly


def draw(data: ReportData) -> Figure:
    """Draw the TFLOPS of each size over its operations per byte: of what serves, the library and the floor."""
    records = data.longest(_MOST_SIZES)
    floors = [(record, data.floor_seconds(record)) for record in records]
    series: list[tuple[str, str, str, list[tuple[Record, float | None]]]] = [
        ("what serves", OURS, "circle", [(r, r.served_seconds) for r in records]),
        ("library", LIBRARY, "diamond-open", [(r, r.library_seconds) for r in records]),
        ("floor", FLOOR, "line-ew-open", floors),
    ]
    traces = [_points(name, colour, symbol, [(r, s) for r, s in of if s]) for name, colour, symbol, of in series]
    caption = (
        "Rate over operations per byte that must pass through memory. The floor is the longer of what the data sheet "
        "allows and the shortest kernel seen on the device; lines are the data sheet's roofs."
    )
    if not any(seconds for _, seconds in floors):
        caption = "Rate over operations per byte that must pass through memory. No facts of these devices are known, "
        caption += "so there is neither floor nor roof."
    if len(records) < len(data.records):
        caption += f" Of {len(data.records)} sizes the {len(records)} that take most time are drawn."
    layout = {"xaxis": log_axis("operations per byte"), "yaxis": log_axis("TFLOPS"), "hovermode": "closest"}
    drawn = tuple(trace for trace in (*_roofs(data, records), *traces) if trace["x"])
    return Figure("roofline", _TITLE, caption, drawn, layout, 520)


def _points(name: str, colour: str, symbol: str, times: Iterable[tuple[Record, float]]) -> dict[str, Any]:
    found = [(r, s, number(_intensity(r)), number(r.problem.flops / s / 1e12)) for r, s in times]
    shown = [point for point in found if point[2] and point[3]]
    return marks(
        {"color": colour, "symbol": symbol, "size": 8, "opacity": 0.85, "line": {"width": 1.5}},
        [x for _, _, x, _ in shown],
        [y for _, _, _, y in shown],
        name=name,
        text=[f"{plain(r.problem.key)}<br>{s * 1e6:.4g} us" for r, s, _, _ in shown],
        hovertemplate="%{text}<br>%{y:.4g} TFLOPS<extra>" + name + "</extra>",
    )


def _intensity(record: Record) -> float:
    return record.problem.flops / record.problem.bytes


def _roofs(data: ReportData, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a line for each rate of a device: slanted where memory bounds, level where the matrix units do."""
    lines: dict[str, dict[str, Any]] = {}
    intensities = [_intensity(record) for record in records]
    for record in records:
        device = device_of(record)
        target = data.targets.get(device)
        if target is None:
            continue
        dtype = record.problem.a.type if target.supports(record.problem.a.type) else None
        rate = target.tflops(dtype) if dtype else target.peak_tflops["fp16"]
        knee = rate * 1e3 / target.hbm_gbps
        name = f"{rate:.4g} TFLOPS, {target.hbm_gbps / 1e3:.3g} TB/s: {plain(device.label)}"
        if name in lines:
            continue
        xs = sorted({min(intensities) / 2, knee, max(max(intensities) * 2, knee)})
        lines[name] = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "line": {"color": FLOOR, "width": 1, "dash": "dot" if lines else "solid"},
            "x": [number(x) for x in xs],
            "y": [number(min(rate, x * target.hbm_gbps / 1e3)) for x in xs],
            "hoverinfo": "name",
        }
    return list(lines.values())

"""Writes the page: figures as JSON, tables as HTML, and plotly's script, in one file that needs nothing else.

The page says in a policy which scripts may run, by their hashes, and that nothing may be loaded: a browser runs
nothing that a file of results brought along, wherever in the page it would stand.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from tritongemm.core.errors import UnavailableError
from tritongemm.report.page import failures, gains, in_server, roofline, tables, time_to_quality, winners
from tritongemm.report.page.figure import Figure
from tritongemm.report.page.report_data import ReportData, uplift_of
from tritongemm.report.page.time_to_quality import GOAL
from tritongemm.results.server_comparison import ServerComparison
from tritongemm.system.printable import printable
from tritongemm.system.version import VERSION

START = "<!doctype html>\n<!-- a report of tritongemm -->\n"  # how every page begins
_HERE = Path(__file__).parent
_TITLE_CHARACTERS = 200
_OF_A_DEVICE: tuple[Callable[[ReportData], Figure], ...] = (
    *(roofline.draw, gains.draw_ratios, gains.draw_uplift, gains.draw_left),
    *(winners.draw_won, winners.draw_ranges, winners.draw_regret),
)


def is_page(start: bytes) -> bool:
    """Return whether a file that begins so is empty, or such a page."""
    return not start or start.startswith(START.encode())


def draw_all(data: ReportData) -> tuple[Figure, ...]:
    """Draw every figure, in the order of the page; of several devices each has those of its own that show something."""
    figures: list[Figure] = [in_server.draw(data.server)] if data.server else []
    parts = list(data.by_device())
    for place, (device, part) in enumerate(parts, start=1):
        drawn = [draw(part) for draw in _OF_A_DEVICE]
        if len(parts) > 1:
            label = printable(device.label, _TITLE_CHARACTERS)
            drawn = [replace(f, name=f"{f.name}-{place}", title=f"{f.title}: {label}") for f in drawn if f.traces]
        figures += drawn
    return (*figures, time_to_quality.draw(data), failures.draw(data))


def compose(data: ReportData, title: str) -> str:
    """Return the page."""
    figures = draw_all(data)
    plotly, script = _plotly(), (_HERE / "page.js").read_text(encoding="utf-8")
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    drawn = {f.name: {"data": f.traces, "layout": dict(f.layout, height=f.height)} for f in figures if f.traces}
    body = environment.get_template("page.html.j2").render(
        title=printable(title, _TITLE_CHARACTERS),
        version=VERSION,
        tiles=list(tile_groups(data)),
        notes=[printable(note) for note in data.notes],
        figures=figures,
        reasons=tables.tabulate_reasons(data),
        environment=tables.tabulate_environment(data),
        sizes=tables.tabulate_sizes(data),
        older=tables.tabulate_changes(data),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        drawn=embed(drawn),
        plotly=plotly,
        script=script,
        hashes=" ".join(_hash(text) for text in (plotly, script)),
    )
    return START + body


def _plotly() -> str:
    """Return the script of plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnavailableError("a report is drawn with plotly: pip install 'tritongemm[report]'") from error
    script: str = get_plotlyjs()
    return script


def embed(value: Any) -> str:
    """Return values as JSON within a page, whose text can't end the element that holds it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    """Return the hash by which a policy allows a script to run."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def tile_groups(data: ReportData) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Yield the page's first numbers: a few of each device, which is named where there are several, and of runs."""
    if data.server:
        yield "How many times faster the server is", list(_server_tiles(data.server))
    for device, part in data.by_device():
        yield printable(device.label, _TITLE_CHARACTERS) if len(data.devices) > 1 else "", list(_tiles(part))
    yield "", list(_run_tiles(data))


def _tiles(data: ReportData) -> Iterable[tuple[str, str]]:
    """Yield a few numbers of a device's results, each with its label."""
    yield str(len(data.records)), "sizes"
    uplift_found = uplift_of(data)
    if data.raced:
        ties = sum(record.tie for record in data.raced)
        lost = sum(not record.tie and record.winner == record.library for record in data.raced)
        yield str(len(data.raced) - ties - lost), "won from the library"
        yield str(ties), "ties"
        yield str(lost), "lost to it"
    if uplift_found is not None:
        yield f"{uplift_found.geometric + 1:.3f}", "geometric mean of the ratios"
        yield f"{uplift_found.weighted:.1%}", "of the library's time saved"
    shares = [(data.floor_seconds(r) or 0.0) / r.served_seconds for r in data.records]
    if shares and all(shares):
        yield f"{sum(shares) / len(shares):.2f}", "of the floor on average"


def _server_tiles(comparison: ServerComparison) -> Iterable[tuple[str, str]]:
    """Yield how many times faster a step is, or the first token of a long prompt."""
    for load in comparison.loads:
        name, words = ("ttft_ms", "first token") if load.name.startswith("prompt") else ("step_ms", "step")
        yield f"{next(one.gain.ratio for one in load.quantities if one.name == name):.3f}", f"{words}, {load.name}"


def _run_tiles(data: ReportData) -> Iterable[tuple[str, str]]:
    """Yield how long each run took to come near its best."""
    for curve in time_to_quality.curves_of(data).values():
        passed = curve.reached(GOAL)
        if passed is not None:
            yield f"{passed:.1f} s", f"to {GOAL:.0%} of the final speed"

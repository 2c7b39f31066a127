"""Defines a figure of the page, and makes text from files safe for it.

A figure consists of plotly's JSON: traces and a layout. The page's script gives it colours of text and grid, so no
figure names those. Plotly reads a few tags of HTML and ``%{…}`` in texts; `plain` writes what comes from files so that
it is shown as it is.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from tritongemm.system.printable import printable

LABEL_CHARACTERS = 120
SHARES = ".3~%"  # of an axis: as many decimals as its ticks differ in

OURS, LIBRARY, FLOOR, WORSE = "#4c8dd8", "#e08a2e", "#8a929c", "#d1495b"
EDGE = {"width": 1, "color": "rgba(128,128,128,0.6)"}
# Distinguishable for people who see fewer colours, on light and on dark ground.
COLOURS = (OURS, LIBRARY, "#2fa084", "#c77bb5", "#b8a13a", "#7a6ff0", "#5bb6e0", "#d1495b", "#8c6d4f", FLOOR)


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # its anchor in the page
    title: str  # its heading
    caption: str  # what it shows, in full sentences
    # Plotly's traces; empty where there is nothing to draw, and the caption then says why.
    traces: tuple[Mapping[str, Any], ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)  # plotly's layout
    height: int = 420  # in pixels


def plain(text: str, limit: int = LABEL_CHARACTERS) -> str:
    """Return text from a file such that plotly shows it unchanged."""
    return html.escape(printable(text, limit), quote=False)


def number(value: float | None, digits: int = 5) -> float | None:
    """Return a number rounded to a number of digits for a figure; None where it is not finite."""
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, the same for the same names in the same order."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis of plotly's layout, with its title."""
    return {"title": {"text": title}, **more}


def log_axis(title: str) -> dict[str, Any]:
    """Return a logarithmic axis of plotly's layout, with its title."""
    return axis(title, type="log", dtick="D2")


def names_axis(top_down: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Return an axis of plotly's layout that has names, in the order of the bars or from the top down."""
    order = {"categoryorder": "array", "categoryarray": [plain(name) for name in reversed(top_down)]}
    return {"type": "category", "automargin": True, **(order if top_down else {}), **more}


def bars(name: str, marker: Mapping[str, Any], y: Sequence[str], x: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return plotly's horizontal bars, one for each name in `y`; a text is shown where the pointer is."""
    shown = {"textposition": "none"} if "text" in more else {}
    return {"type": "bar", "orientation": "h", "name": name, "marker": marker, "y": y, "x": x, **shown, **more}


def marks(marker: Mapping[str, Any], x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return plotly's marks at points."""
    return {"type": "scatter", "mode": "markers", "marker": marker, "x": x, "y": y, **more}

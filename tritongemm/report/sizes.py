"""The table of sizes that a command would work on."""

from collections.abc import Sequence

from tritongemm.core.format_row import FormatRow
from tritongemm.report.console import Reporter

_COLUMNS = ("size", "M", "N", "K", "count", "callers")


def print_sizes(reporter: Reporter, rows: Sequence[FormatRow]) -> None:
    """Print each size with its weight and callers, and how many there are."""
    cells = []
    for row in rows:
        p = row.problem
        cells.append([p.key, str(p.m), str(p.n), str(p.k), f"{row.count:g}", ", ".join(row.callers)])
    reporter.table("", list(_COLUMNS), cells)
    reporter.say(f"{len(rows)} size{'s' if len(rows) != 1 else ''}")

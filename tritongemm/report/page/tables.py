"""The page's tables: every size, why candidates failed, and the environment."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from tritongemm.core.record import Record
from tritongemm.report.page import older
from tritongemm.report.page.failures import MOST_REASONS, reasons_of
from tritongemm.report.page.report_data import ReportData, device_of
from tritongemm.system.printable import printable

_CELL_CHARACTERS = 400


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str  # what is shown
    order: float | None = None  # a number that it is sorted by; None for one that is sorted by its text


@dataclass(frozen=True)
class HtmlTable:
    """A table of the page."""

    name: str  # its anchor
    title: str  # its heading
    caption: str  # a sentence above it; "" where there is none
    columns: tuple[str, ...]  # their names
    rows: tuple[tuple[Cell, ...], ...]  # cells, one for each column
    sortable: bool = False  # whether a click on a column's name sorts it


_SIZE_COLUMNS = (
    "size", "M from", "M", "N", "K", "calls", "us", "library us", "ratio", "floor us", "of floor", "TFLOPS", "GB/s",
    "winner", "tie", "error", "timer", "device", "order", "config",
)  # fmt: skip


def tabulate_sizes(data: ReportData) -> HtmlTable:
    """Return the table of all sizes: a row for each, with its times in microseconds, its rates and its winner."""
    rows = tuple(tuple(_size_cells(record, data)) for record in data.records)
    caption = "A click on a column's name sorts by it, and another one turns the order. The table scrolls sideways."
    return HtmlTable("sizes", "Every size", caption, _SIZE_COLUMNS, rows, sortable=True)


def _size_cells(record: Record, data: ReportData) -> Iterable[Cell]:
    problem, floor = record.problem, data.floor_seconds(record)
    library = record.library_seconds
    yield _word(problem.key)
    yield from (_number(size, "d") for size in (record.m_from or None, problem.m, problem.n, problem.k))
    yield _number(data.weight(record), ".6g")
    yield _number(record.seconds * 1e6, ".2f")
    yield _number(library and library * 1e6, ".2f")
    yield _number(record.speedup, ".3f")
    yield _number(floor and floor * 1e6, ".2f")
    yield _number(floor and floor / record.served_seconds, ".2f")
    yield _number(record.tflops, ".1f")
    yield _number(record.gbps, ".0f")
    yield _word(record.winner)
    yield _word("tie" if record.tie and library is not None else "")
    yield _number(record.error, ".1e")
    yield _word(record.timer)
    yield _word(device_of(record).label)
    yield _word(record.order)
    yield _word(record.config.short_name)


def tabulate_changes(data: ReportData) -> HtmlTable | None:
    """Return the sizes of old and new results, those first whose time changed most; None where none are compared."""
    if data.older is None:
        return None
    found = older.changes(data, data.older)
    rows = tuple(
        (_word(one.record.problem.key), _word(one.change), _number(one.calls, ".6g"),
         *(_number(r.served_seconds * 1e6 if r else None, ".2f") for r in (one.old, one.new)),
         _number(one.old.served_seconds / one.new.served_seconds if one.old and one.new else None, ".3f"),
         _number(one.saved_seconds * 1e3, ".4g"), *(_word(r.winner if r else "") for r in (one.old, one.new)))
        for one in found
    )  # fmt: skip
    columns = ("size", "change", "calls", "old us", "new us", "ratio", "ms saved", "old winner", "winner")
    caption = f"{older.describe(found)}. Times are of what serves; sizes within 2 % or their noise are alike."
    return HtmlTable("older", "Against older results", caption, columns, rows, sortable=True)


def tabulate_reasons(data: ReportData) -> HtmlTable | None:
    """Return why candidates failed; None where none did, or no journal says so."""
    reasons = reasons_of(data)
    if not reasons:
        return None
    rows = tuple(
        (_number(r.count, "d"), _word(r.backend), _word(r.status), _word(r.text), _word(r.example))
        for r in reasons[:MOST_REASONS]
    )
    caption = "Reasons with the same words and other numbers count as one."
    if len(reasons) > len(rows):
        caption += f" {len(reasons) - len(rows)} rarer ones are left out."
    columns = ("count", "backend", "status", "reason", "for example")
    return HtmlTable("reasons", "Reasons", caption, columns, rows, sortable=True)


def tabulate_environment(data: ReportData) -> HtmlTable:
    """Return what the results were made with, and the files that they are from."""
    facts: dict[tuple[str, str], None] = {}
    for record in data.records:
        facts["device", device_of(record).label] = None
        units = f", {record.compute_units} compute units" if record.compute_units else ""
        facts["architecture", record.target + units] = None
        facts.update(dict.fromkeys((k, v) for k, v in record.toolchain.items() if k != "device"))
        facts["clock", record.timer] = None
        facts["operands", "cold: not in the last-level cache" if record.cold else "warm"] = None
    for name, history in data.histories.items():
        protocol = history.header.get("protocol")
        if protocol:
            facts[f"protocol of {name}", json.dumps(protocol, ensure_ascii=False)] = None
        if history.seconds is not None:
            facts[f"length of {name}", f"{history.seconds:.1f} s, {len(history.tried)} candidates"] = None
    facts.update(dict.fromkeys(("read", source) for source in data.sources))
    rows = tuple((_word(name), _word(value)) for name, value in facts)
    return HtmlTable("environment", "Environment", "", ("what", "value"), rows)


def _word(text: str) -> Cell:
    return Cell(printable(text, _CELL_CHARACTERS))


def _number(value: float | None, form: str) -> Cell:
    """Return a number as a cell; missing and infinite ones are sorted behind all others."""
    if value is None or not isfinite(value):
        return Cell("-" if value is None else str(value), float("inf"))
    return Cell(format(value, form), value)

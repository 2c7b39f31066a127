"""Reads rows of a campaign's CSV files, each with its place, and their numbers."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.formats import plain_text
from tritongemm.system.printable import printable
from tritongemm.system.reading import read_bytes


def read_rows(path: Path, wanted: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of a CSV by column, each with its place for messages."""
    try:
        text = plain_text(read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: byte {error.start} is not UTF-8") from None
    lines = csv.reader(io.StringIO(text), strict=True)
    rows = []
    try:
        head = next(lines, [])
        missing = [name for name in wanted if name not in head]
        if missing:
            raise InputError(
                f"{path}: line 1 has no column {', '.join(missing)}; the stage that writes it must run first"
            )
        for number, cells in enumerate(filter(None, lines), start=1):
            where = f"{path}: row {number} (line {lines.line_num})"
            if len(cells) != len(head):
                raise InputError(f"{where} has {len(cells)} cells, the head {len(head)}; it may be cut")
            rows.append((where, dict(zip(head, cells, strict=True))))
    except csv.Error as error:
        raise InputError(f"{path}: line {lines.line_num}: {error}") from None
    return rows


def read_number(where: str, row: Mapping[str, str], column: str, most: float = 1e300) -> float | None:
    """Return a number of at least 0; None where the cell is empty."""
    text = row[column].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise InputError(f"{where} {column} must be a number from 0 on, not {printable(repr(text), 40)}")
    return value

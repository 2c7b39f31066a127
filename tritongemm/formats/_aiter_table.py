"""Keeps the lines of one of AITER's CSVs byte for byte, with their cells by the names of columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.core.errors import InputError

_MARK = "\ufeff"  # of a file that a spreadsheet wrote
_MOST_COLUMNS = 200
NO_CSV = "is no CSV: a cell that begins with a quotation mark must end with one in the same line"
_EACH = "write one for each, with commas between them"
_LAST = "_tag"  # the column that lines of AITER's own files leave out where it would be empty


@dataclass(frozen=True)
class CsvLine:
    """One line after the first.

    Attributes:
        text: as it is in the file, without its end.
        number: of the line in the file, from 1.
        row: its number among the lines that are not blank, from 1; 0 for a blank one.
        cells: without the blanks around them, by column; empty where the line is blank or wrong.
        fault: what is wrong with it.
    """

    text: str
    number: int = 0
    row: int = 0
    cells: Mapping[str, str] | None = None
    fault: str = ""


@dataclass(frozen=True)
class CsvTable:
    """A file.

    Attributes:
        columns: names in the first line.
        header: the line with these names as it is, with the blank lines above it.
        lines: those after it.
        ended: whether the last line has an end.
    """

    columns: tuple[str, ...]
    header: str
    lines: tuple[CsvLine, ...]
    ended: bool

    @classmethod
    def parse(cls, path: Path, text: str) -> CsvTable:
        """Return the table of a file."""
        every = text.split("\n")
        place = header_place(every)
        texts = every[place + 1 :]
        columns = cells_of(every[place].removeprefix(_MARK))
        if columns is None or len(columns) > _MOST_COLUMNS or len({*columns}) != len(columns):
            raise InputError(f"{path}: line {place + 1} does not name the columns of a CSV, each once")
        ended = bool(texts) and not texts[-1]
        lines = _lines(columns, texts[:-1] if ended else texts, place + 2)
        return cls(tuple(columns), "\n".join(every[: place + 1]), tuple(lines), ended)

    @property
    def rows(self) -> Iterator[tuple[CsvLine, Mapping[str, str]]]:
        """The lines that are not blank nor wrong, with their cells."""
        return ((line, line.cells) for line in self.lines if line.cells is not None)

    @property
    def line_end(self) -> str:
        """The text before the end of each line: a carriage return in files of Windows."""
        return "\r" if self.header.endswith("\r") else ""

    def line_of(self, cells: Mapping[str, str]) -> CsvLine:
        """Return a new line with the cells of the file's columns."""
        out, held = io.StringIO(), {name: cells.get(name, "") for name in self.columns}
        csv.writer(out, lineterminator="").writerow(held.values())
        return CsvLine(out.getvalue() + self.line_end, cells=held)

    def with_end(self, line: CsvLine) -> CsvLine:
        """Return a line of another file, with the end of this one's lines."""
        return replace(line, text=line.text.removesuffix("\r") + self.line_end)

    def with_lines(self, lines: Sequence[CsvLine]) -> str:
        """Return the file's text with other lines; the last one ends with a line end where the file changed."""
        if [line.text for line in lines] == [line.text for line in self.lines]:
            return "\n".join([self.header, *(line.text for line in lines)]) + ("\n" if self.ended else "")
        unended = () if self.ended else self.lines[-1:]
        texts = ((self.with_end(line) if line in unended else line).text for line in lines)
        return "\n".join([self.header, *texts]) + "\n"


def cells_of(line: str) -> list[str] | None:
    """Return the cells of a line without the blanks around them; None where it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True), [])]
    except csv.Error:
        return None


def columns_of(text: str) -> list[str] | None:
    """Return the names of columns in a file's first line that is not blank; None where it is no CSV."""
    lines = text.split("\n")
    return cells_of(lines[header_place(lines)].removeprefix(_MARK))


def header_place(lines: Sequence[str]) -> int:
    """Return the index of the line that names the columns: the first that is not blank, or 0."""
    return next((place for place, line in enumerate(lines) if not _is_blank(line.removeprefix(_MARK))), 0)


def _is_blank(line: str) -> bool:
    """Return whether a line has no cell with text, as spreadsheets write rows without any."""
    return not line.strip(" \t\r,")


def _lines(columns: Sequence[str], texts: Sequence[str], first: int) -> Iterator[CsvLine]:
    row = 0
    for number, text in enumerate(texts, start=first):
        if _is_blank(text):
            yield CsvLine(text, number)
            continue
        row += 1
        cells = cells_of(text)
        if cells is not None and (*columns[len(cells) :],) == (_LAST,):
            cells.append("")
        if cells is None:
            yield CsvLine(text, number, row, fault=NO_CSV)
        elif len(cells) != len(columns):
            yield CsvLine(text, number, row, fault=f"has {len(cells)} values for {len(columns)} columns; {_EACH}")
        else:
            yield CsvLine(text, number, row, dict(zip(columns, cells, strict=True)))

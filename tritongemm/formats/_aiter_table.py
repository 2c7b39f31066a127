"""Keeps the lines of AITER's CSVs byte for byte, with their cells by the names of columns, and checks the names."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.formats import _aiter_families
from tritongemm.system.printable import printable

_MARK = "\ufeff"  # of a file that a spreadsheet wrote
_MOST_COLUMNS = 200
NO_CSV = "is no CSV: a cell that begins with a quotation mark must end with one in the same line"
_EACH = "write one for each, with commas between them"
_LAST = "_tag"  # the column that lines of AITER's own files leave out where it would be empty


@dataclass(frozen=True)
class CsvLine:
    """One line after the first."""

    text: str  # as it is in the file, without its end
    number: int = 0  # of the line in the file, from 1
    row: int = 0  # its number among the lines that are not blank, from 1; 0 for a blank one
    # Without the blanks around them, by column; empty where the line is blank or wrong.
    cells: Mapping[str, str] | None = None
    fault: str = ""  # what is wrong with it


@dataclass(frozen=True)
class CsvTable:
    """A file."""

    columns: tuple[str, ...]  # names in the first line
    header: str  # the line with these names as it is, with the blank lines above it
    lines: tuple[CsvLine, ...]  # those after it
    ended: bool  # whether the last line has an end

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


_SEPARATORS = ";\t|"  # that spreadsheets write instead of commas
_LOOKED_AT_LINES = 20  # below the first one, for the names of columns
_SHORTEST_NAME = 4  # characters of a name that another one can be a misspelling of
_LIKENESS = 0.8  # share of equal characters from which a name is taken for a misspelling
_SHOWN_CHARACTERS = 60
_ALL_KEYS = tuple(dict.fromkeys(key for family in _aiter_families.FAMILIES for key in family.keys))


def fault_of(path: Path, text: str) -> str:
    """Return why a file that seems meant as AITER's is not recognised, and what to change; "" if it does not."""
    place = header_place(text.split("\n"))
    line, where = text.split("\n")[place], f"{path}: line {place + 1}"
    separator = next((mark for mark in _SEPARATORS if _names_sizes(line.split(mark))), "")
    if separator:
        return f"{where} separates the names of columns by {separator!r}; write commas, in every line of the file"
    columns = columns_of(text)
    if columns is None:
        return f"{where} {NO_CSV}" if path.suffix == ".csv" else ""
    if _names_sizes(columns):
        wrong = misspelling(columns)
        others = _aiter_families.unknown_columns(columns)
        if wrong or others:
            return f"{where} {wrong or f'has the unknown column {_shown(others[0])}; remove it, or begin with M'}"
    return f"{where} {fault}" if path.suffix == ".csv" and (fault := _fault_of_names(columns, text)) else ""


def _fault_of_names(columns: Sequence[str], text: str) -> str:
    """Return what is wrong with the first cells of a CSV that do not name all of M, N and K; "" where unknown."""
    lines = enumerate(map(cells_of, text.split("\n")[:_LOOKED_AT_LINES]), 1)
    if below := [number for number, cells in lines if cells is not None and _aiter_families.is_header(cells)]:
        return f"does not name the columns, but line {below[0]} does; remove the lines above it"
    if any(cell.removesuffix(".0").isdigit() for cell in columns[:3]):
        return "has values in place of the names of columns; begin the file with a line such as M,N,K"
    missing = [name for name in _aiter_families.SIZES if name not in _aiter_families.own_names(columns)]
    names = len(columns) > 1 and all(cell.isidentifier() for cell in columns)
    return f"names no column {', '.join(missing)}; a row needs M, N and K" if names and missing else ""


def check_names(path: Path, text: str, columns: Sequence[str]) -> None:
    """Refuse names of columns of which one is misspelt or there twice, as its cells would be skipped."""
    names = _aiter_families.own_names(columns)
    double = next((name for place, name in enumerate(columns) if names[place] in names[:place]), "")
    wrong = f"has the column {names[columns.index(double)]} twice" if double else misspelling(columns)
    if wrong:
        raise InputError(f"{path}: line {header_place(text.split(chr(10))) + 1} {wrong}")


def misspelling(columns: Sequence[str]) -> str:
    """Return the first unknown column that is nearly one that its family has and the file lacks; "" if none is."""
    families, names = _aiter_families.fitting(columns), _aiter_families.own_names(columns)
    keys = [key for family in families for key in family.keys] if families else _ALL_KEYS
    absent = {key.casefold(): key for key in keys if key not in names}
    for name in _aiter_families.unknown_columns(columns):
        key = absent.get(name.casefold()) or _nearest(name, absent)
        if key:
            return f"has the unknown column {_shown(name)}; did you mean {key!r}?"
    return ""


def _nearest(name: str, absent: dict[str, str]) -> str:
    if not _SHORTEST_NAME <= len(name) <= _SHOWN_CHARACTERS:
        return ""
    near = difflib.get_close_matches(name.casefold(), absent, n=1, cutoff=_LIKENESS)
    return absent[near[0]] if near else ""


def _names_sizes(cells: Iterable[str]) -> bool:
    """Return whether cells name the sizes of a product, or of a layer with experts, in capitals or not."""
    names = {cell.strip(' "').casefold() for cell in cells}
    return any(
        names.issuperset(map(str.casefold, sizes)) for sizes in (_aiter_families.SIZES, _aiter_families.EXPERT_SIZES)
    )


def _shown(name: str) -> str:
    return repr(printable(name, _SHOWN_CHARACTERS))

"""Reads the first line of AITER's CSVs, which names the columns, and names what is wrong with it."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.formats._aiter_families import (
    EXPERT_SIZES,
    FAMILIES,
    SIZES,
    fitting,
    is_header,
    own_names,
    unknown_columns,
)
from tritongemm.formats._aiter_table import NO_CSV, cells_of, columns_of, header_place
from tritongemm.system.printable import printable

_SEPARATORS = ";\t|"  # that spreadsheets write instead of commas
_LOOKED_AT_LINES = 20  # below the first one, for the names of columns
_SHORTEST_NAME = 4  # characters of a name that another one can be a misspelling of
_LIKENESS = 0.8  # share of equal characters from which a name is taken for a misspelling
_SHOWN_CHARACTERS = 60
_ALL_KEYS = tuple(dict.fromkeys(key for family in FAMILIES for key in family.keys))


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
        others = unknown_columns(columns)
        if wrong or others:
            return f"{where} {wrong or f'has the unknown column {_shown(others[0])}; remove it, or begin with M'}"
    return f"{where} {fault}" if path.suffix == ".csv" and (fault := _fault_of_names(columns, text)) else ""


def _fault_of_names(columns: Sequence[str], text: str) -> str:
    """Return what is wrong with the first cells of a CSV that do not name all of M, N and K; "" where unknown."""
    below = [number for number, line in enumerate(text.split("\n")[:_LOOKED_AT_LINES], 1) if _is_names(line)]
    if below:
        return f"does not name the columns, but line {below[0]} does; remove the lines above it"
    if any(cell.removesuffix(".0").isdigit() for cell in columns[:3]):
        return "has values in place of the names of columns; begin the file with a line such as M,N,K"
    missing = [name for name in SIZES if name not in own_names(columns)]
    names = len(columns) > 1 and all(cell.isidentifier() for cell in columns)
    return f"names no column {', '.join(missing)}; a row needs M, N and K" if names and missing else ""


def check(path: Path, text: str, columns: Sequence[str]) -> None:
    """Refuse names of columns of which one is misspelt or there twice, as its cells would be skipped."""
    names = own_names(columns)
    double = next((name for place, name in enumerate(columns) if names[place] in names[:place]), "")
    wrong = f"has the column {names[columns.index(double)]} twice" if double else misspelling(columns)
    if wrong:
        raise InputError(f"{path}: line {header_place(text.split(chr(10))) + 1} {wrong}")


def misspelling(columns: Sequence[str]) -> str:
    """Return the first unknown column that is nearly one that its family has and the file lacks; "" if none is."""
    families, names = fitting(columns), own_names(columns)
    keys = [key for family in families for key in family.keys] if families else _ALL_KEYS
    absent = {key.casefold(): key for key in keys if key not in names}
    for name in unknown_columns(columns):
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
    return any(names.issuperset(map(str.casefold, sizes)) for sizes in (SIZES, EXPERT_SIZES))


def _is_names(line: str) -> bool:
    columns = cells_of(line)
    return columns is not None and is_header(columns)


def _shown(name: str) -> str:
    return repr(printable(name, _SHOWN_CHARACTERS))

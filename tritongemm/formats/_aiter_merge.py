"""Replaces, adds and merges lines of AITER's CSVs by what they are of, the fastest first; others stay as they are."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Merged
from tritongemm.formats._aiter_families import DEVICE, OTHER_NAMES, CsvFamily, family_of_file, has_results
from tritongemm.formats._aiter_rows import device, seconds_of, whole_number
from tritongemm.formats._aiter_table import CsvLine, CsvTable

_Key = tuple[str, ...]
# Outcomes of merged lines that are worth a message.
_SHADOWED = "are as fast, or faster, in an earlier file"
_FASTER = "go before slower ones of earlier files"
_WRONG = "have more or fewer values than columns, and are left out"
_SORTED = ("B", "N", "M", "K", "token")  # N before M, as AITER's tuners sort; B stands before both


def is_faster(time: Decimal | None, other: Decimal | None) -> bool:
    """Return whether a time goes before another; a placeholder, which has none, goes last."""
    return time is not None and (other is None or time < other)


class Lines:
    """The lines of a file, some of which are replaced."""

    def __init__(self, table: CsvTable, family: CsvFamily) -> None:
        self.table = table
        self._keys = [name for name in table.columns if OTHER_NAMES.get(name, name) in family.keys]
        self._lines = list(table.lines)
        self._places: dict[_Key, int] = {}
        for place, line in enumerate(self._lines):
            if line.cells is not None:
                self._places.setdefault(self._key(line.cells), place)
        keys = [_sort_key(line) for line in self._lines]
        self._sorted = all(line.cells is not None for line in self._lines) and keys == sorted(keys)

    def there(self, cells: Mapping[str, str]) -> Mapping[str, str]:
        """Return the cells of the line of the same product; empty where there is none."""
        place = self._places.get(self._key(cells))
        return {} if place is None else self._lines[place].cells or {}

    def seconds(self, cells: Mapping[str, str]) -> Decimal | None:
        """Return the time in the line of the same product; None where there is none."""
        return seconds_of(self.there(cells))

    def __contains__(self, cells: Mapping[str, str]) -> bool:
        return self._key(cells) in self._places

    def put(self, line: CsvLine, cells: Mapping[str, str]) -> None:
        """Add a line, in the place of the one of the same product."""
        place = self._places.setdefault(self._key(cells), len(self._lines))
        self._lines[place : place + 1] = [line]

    def keep(self, line: CsvLine) -> None:
        """Add a line that can't be read, unless it is there."""
        if all(line.text.rstrip() != other.text.rstrip() for other in self._lines):
            self._lines.append(line)

    def text(self, arranged: bool = False) -> str:
        """Return the file; one that was sorted still is."""
        lines = self._lines
        if arranged:
            lines = [line for line in lines if line.text.strip()]
        if arranged or self._sorted:
            lines = sorted(lines, key=_sort_key)
        return self.table.with_lines(lines)

    def _key(self, cells: Mapping[str, str]) -> _Key:
        """Return the key of a line: its device and the family's keys, each as a reader takes it."""
        target, units = device(cells)
        return (target, str(units), *(_canonical(cells.get(name, "")) for name in self._keys))


def _sort_key(line: CsvLine) -> tuple[object, ...]:
    """Return the sort key of AITER's tuners; equal lines keep their order."""
    cells = {OTHER_NAMES.get(name, name): cell for name, cell in (line.cells or {}).items()}
    numbers = [whole_number(cells.get(name, "")) or 0 for name in _SORTED]
    return (line.cells is None, *device(cells), *numbers)


def _canonical(text: str) -> str:
    """Return a cell as it is compared: ``FALSE`` is ``False``, and ``64.0`` is ``64``."""
    number = whole_number(text)
    return str(number) if number is not None else text.lower()


def merge(sources: Sequence[tuple[Path, str]], wanted: str) -> Merged:
    """Merge files of one family: the first file, then the others' lines that it lacks or that are faster."""
    tables = [(path, CsvTable.parse(path, text)) for path, text in sources]
    families = [family_of_file(path, table.columns, wanted) for path, table in tables]
    (first, base), family = tables[0], families[0]
    for (path, table), other in zip(tables, families, strict=True):
        if other != family:
            raise InputError(
                f"{path} is of AITER's family {other.name}, and {first} of {family.name}; merge each alone"
            )
        if has_results(table.columns) != has_results(base.columns):
            raise InputError(f"of {first} and {path} one has sizes and the other has results; merge each alone")
    names = dict.fromkeys(_name_in(base, name) for _, table in tables for name in table.columns)
    lines = Lines(_widened(base, [name for name in names if name not in base.columns]), family)
    notes = []
    for path, table in tables[1:]:
        counts = _add(lines, table)
        notes += [f"{path}: {count} lines {fate}" for fate, count in counts.items() if count]
    return Merged(lines.text(), tuple(notes))


def _add(lines: Lines, table: CsvTable) -> dict[str, int]:
    """Add a file's lines; return how many had each outcome that is worth a message."""
    counts = dict.fromkeys((_SHADOWED, _FASTER, _WRONG), 0)
    same = table.columns == lines.table.columns
    for line in table.lines:
        if line.cells is None:
            if line.row and same:
                lines.keep(lines.table.with_end(line))
            counts[_WRONG] += bool(line.row and not same)
            continue
        named_cells = {_name_in(lines.table, name): cell for name, cell in line.cells.items()}
        target, units = device(named_cells)
        named_cells |= {"gfx": target, "cu_num": str(units)} if target else {}
        if named_cells in lines and not is_faster(seconds_of(named_cells), lines.seconds(named_cells)):
            counts[_SHADOWED] += 1
            continue
        counts[_FASTER] += named_cells in lines
        lines.put(lines.table.with_end(line) if same else lines.table.line_of(named_cells), named_cells)
    return counts


def _name_in(table: CsvTable, name: str) -> str:
    """Return a table's name of a column, which has had other names."""
    others = [other for names in OTHER_NAMES.items() if name in names for other in names]
    return next((other for other in (name, *others) if other in table.columns), name)


def _widened(table: CsvTable, more: Sequence[str]) -> CsvTable:
    """Return the table with more columns: those of the device in front, as AITER has them, others behind."""
    if not more:
        return table
    front = [name for name in DEVICE if name in more]
    columns = (*front, *table.columns, *(name for name in more if name not in front))
    wide = CsvTable(columns, ",".join(columns) + table.line_end, (), True)
    lines = []
    for line in table.lines:
        if line.cells is None:
            lines.append(line)
            continue
        target, units = device(line.cells)
        lines.append(wide.line_of({"gfx": target, "cu_num": str(units), **line.cells}))
    return CsvTable(columns, wide.header, tuple(lines), True)

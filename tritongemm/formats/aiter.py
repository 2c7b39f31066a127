"""Format: AITER's CSVs of sizes (``bf16_untuned_gemm.csv``) and of tuned configs (``bf16_tuned_gemm.csv``).

`_aiter_families` has the columns of each family, `_aiter_rows` what their cells mean. Columns are known by their names,
in the order of any generation. What is written changes only the lines of these results.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import DamagedFileWarning, InputError, RemarkWarning
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, Merged, NamedKernel, ResultsFile, Translation
from tritongemm.core.record import Record
from tritongemm.formats import _aiter_families
from tritongemm.formats import _aiter_merge as merging
from tritongemm.formats import _aiter_moe as moe
from tritongemm.formats._aiter_rows import TARGETS, CellReader, is_of, kept_cells, result_cells, seconds_of
from tritongemm.formats._aiter_table import CsvLine, CsvTable, check_names, columns_of, fault_of
from tritongemm.formats._rows import KeptError, warn_of
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, TunerFormat
from tritongemm.system.printable import printable

_OUTPUT = Path("the output")
_SHOWN = 200  # characters of the names of columns
_Timed = tuple[NamedKernel, float]


class AiterCsv(TunerFormat):
    """A file of one of AITER's families, with sizes or with results."""

    title = "AITER's CSV of sizes or tuned configs"
    suffixes = (".csv",)
    padded_m = True
    families = tuple(family.name for family in _aiter_families.FAMILIES)

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether the first line has AITER's columns; of a new file, whether it has AITER's name."""
        if not text:
            words = (word for family in _aiter_families.FAMILIES for word in family.words)
            return path.suffix in self.suffixes and "tuned" in path.name and any(word in path.name for word in words)
        columns = columns_of(text)
        return columns is not None and _aiter_families.is_header(columns)

    def why_unrecognised(self, path: Path, text: str) -> str:
        """Return what is wrong with the names of columns, of a file that has sizes in columns."""
        return fault_of(path, text)

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return the rows of a file, in its order; those that are wrong or not computed here are kept apart.

        Of rows of one product the fastest is used, or the first; a warning says how many others there are.
        """
        table = CsvTable.parse(path, text)
        check_names(path, text, table.columns)
        family = _aiter_families.family_of_file(path, table.columns, defaults.family, defaults.a.dtype)
        _remark(path, family, table)
        read = CellReader(family, defaults).read
        rows: list[FormatRow] = []
        damaged: list[DamagedRow] = []
        kept: list[tuple[int, int, str]] = []
        for line in table.lines:
            where = f"{path}: row {line.row} (line {line.number})"
            try:
                if family.ours:
                    rows += [read(line, where)] if line.row else []
                else:
                    rows += moe.read_line(line, where, defaults) if line.row else ()
            except KeptError as reason:
                kept.append((line.row, line.number, str(reason)))
            except InputError as error:
                damaged.append(DamagedRow(line.row, line.number, str(error)))
        untunable = warn_of(path, kept)
        used = _without_doubles(path, rows, table) if family.ours else rows
        return ResultsFile(rows=tuple(used), damaged=tuple(damaged), untunable=untunable)

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """Translate results; of layers with experts both products are in the row that asked for them."""
        if not any(row.subject for row in rows):
            return self.translate(records, before)
        family = next(family for family in _aiter_families.FAMILIES if not family.ours)
        return moe.translate(rows, records, before.get("", ""), family)

    def why_not_in(self, path: Path, text: str, family: str, record: Record) -> str:
        """Return why a result of another family is not a row of the file, though its columns may be the same; or ""."""
        columns = CsvTable.parse(_OUTPUT, text).columns if text else ()
        possible = _aiter_families.families_of_output(path, columns, family)
        fits = any(
            is_of(record.problem, found) if found.ours else record.problem.groups is not None for found in possible
        )
        if fits or possible == _aiter_families.FAMILIES:
            return ""
        return f"the file is of AITER's family {' or '.join(found.name for found in possible)}"

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Write the results whose kernels AITER has; other lines stay as they are.

        On a GPU that AITER does not run on, every kernel has our own name: AITER never looks such rows up.
        A result whose kernel AITER lacks is written with the fastest other kernel of the same problem that it has, with
        that one's time, unless the file has a faster one.
        """
        written, omitted = 0, list[tuple[Record, str]]()
        groups = [list(group) for _, group in groupby(sorted(records, key=_thing), key=_thing)]
        family = _family_of_output(before.get("", ""), [group[0] for group in groups])
        if family is None:
            reason = "no family of AITER's computes it"
            return Translation({"": before.get("", "")}, 0, tuple((group[0], reason) for group in groups))
        table = CsvTable.parse(_OUTPUT, before.get("") or ",".join(family.header) + "\n")
        lines = merging.Lines(table, family)
        for group in groups:
            reason = _why_unwritable(group[0], family)
            if not reason:
                is_written, reason = _write_group(group, family, lines)
                written += is_written
            if reason:
                omitted.append((group[0], reason))
        return Translation({"": lines.text() if written else before.get("", "")}, written, tuple(omitted))

    def merge(self, sources: Sequence[tuple[Path, str]], family: str = "") -> Merged:
        """Return the files of one family as one, in the columns of all; only lines that lost are left out."""
        return merging.merge(sources, family)

    def arrange(self, text: str) -> str:
        """Return the file sorted by device, N, M, K and the other keys, as AITER's tuners leave it."""
        table = CsvTable.parse(_OUTPUT, text)
        found = _aiter_families.fitting(table.columns)
        if not found:
            raise InputError(f"its columns are those of none of AITER's families ({', '.join(table.columns)})")
        return merging.Lines(table, found[0]).text(arranged=True)


def _remark(path: Path, family: _aiter_families.CsvFamily, table: CsvTable) -> None:
    """Warn of what does not count in a file, and where its products differ from ours."""
    ignored = [] if _aiter_families.has_results(table.columns) else family.ignores(table.columns)
    if ignored:
        names = printable(", ".join(ignored), _SHOWN)
        warnings.warn(
            f"{path}: sizes of family {family.name}; what other columns say is ignored, as by AITER's tuner: {names}",
            RemarkWarning,
            stacklevel=4,
        )
    if family.remark:
        warnings.warn(f"{path}: {family.remark}", RemarkWarning, stacklevel=4)


def _thing(record: Record) -> tuple[object, ...]:
    """Return what a row of a file is of; it sorts as AITER sorts."""
    p = record.problem
    return record.target, record.compute_units, p.n, p.m, p.k, p.key


def _without_doubles(path: Path, rows: Sequence[FormatRow], table: CsvTable) -> list[FormatRow]:
    """Return the rows without those that a better one repeats."""
    times = {line.row: seconds_of(cells) for line, cells in table.rows}
    best: dict[tuple[object, ...], FormatRow] = {}
    for row in rows:
        thing = (row.problem, row.target, row.compute_units)
        kept = best.setdefault(thing, row)
        if merging.is_faster(times.get(row.number or 0), times.get(kept.number or 0)):
            best[thing] = row
    if len(best) < len(rows):
        used = {row.number for row in best.values()}
        first = next(row for row in rows if row.number not in used)
        warnings.warn(
            f"{path}: {len(rows) - len(best)} rows repeat others, and are not used; the first is in line {first.line}",
            DamagedFileWarning,
            stacklevel=4,
        )
    return sorted(best.values(), key=lambda row: row.number or 0)


def _family_of_output(text: str, records: Sequence[Record]) -> _aiter_families.CsvFamily | None:
    """Return the family of a file for results: that of most of them, of those that the file can be of."""
    columns = CsvTable.parse(_OUTPUT, text).columns if text else ()
    possible = _aiter_families.fitting(columns) if columns else _aiter_families.FAMILIES
    if not possible:
        raise InputError(f"the file that is there is none of AITER's: its columns are {', '.join(columns)}")
    counts = {family: sum(is_of(record.problem, family) for record in records) for family in possible}
    best = max(counts, key=lambda family: counts[family])
    return best if counts[best] else None


def _why_unwritable(record: Record, family: _aiter_families.CsvFamily) -> str:
    """Return why no kernel of a problem can be written, or ""."""
    rules: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: not is_of(record.problem, family), f"the file is of AITER's family {family.name}"),
        (lambda: not record.target, "it does not say which GPU it was tuned on"),
        (lambda: record.predicted, "its time is a prediction"),
        (lambda: not record.compute_units, "it does not say how many compute units its GPU has"),
        (
            lambda: _is_aiters(record) and not family.runs,
            f"rows of AITER's {family.name} name kernels by numbers of AITER's own alone",
        ),
    )
    return next((reason for holds, reason in rules if holds()), "")


def _write_group(group: Sequence[Record], family: _aiter_families.CsvFamily, lines: merging.Lines) -> tuple[bool, str]:
    """Put the best result of a problem that can be written into the file."""
    best = group[0]
    ways = [way for record in group for way in _ways(record)]
    known = [(k, s) for k, s in ways if k is not None and (k.library in family.runs or not _is_aiters(best))]
    winner = best.config.short_name if best.winner == best.config.backend else best.winner
    if not known:
        return False, f"AITER has no kernel for {winner}, and no time of one of its kernels is known"
    chosen: _Timed = known[0] if ways[0] == known[0] else min(known, key=lambda way: way[1])
    measured = next(record for record in group if chosen in _ways(record))
    cells = result_cells(best, family, *chosen) | kept_cells(measured, chosen[0])
    lost = ""
    if ways[0] != chosen:
        seconds, stead = ways[0][1], chosen[0].name
        lost = f"AITER has no kernel for {winner} ({seconds * 1e6:.2f} us)"
        if merging.is_faster(lines.seconds(cells), seconds_of(cells)):
            return False, f"{lost}; the line that is there stays"
        lost += f"; written as {chosen[0].library} {stead} ({chosen[1] * 1e6:.2f} us)"
    cells |= _kept_numbers(lines.there(cells), cells)
    line = lines.table.line_of(cells)
    try:
        read = CellReader(family, Defaults()).read(line, "")
        same = (read.problem, read.target, read.compute_units) == (best.problem, best.target, best.compute_units)
    except InputError:
        same = False
    if not same:
        return False, f"the columns of the file can't hold it ({','.join(lines.table.columns)})"
    if not _is_unchanged(lines.there(cells), line):
        lines.put(line, cells)
    return True, lost


def _kept_numbers(there: Mapping[str, str], cells: Mapping[str, str]) -> dict[str, str]:
    """Return AITER's own number of a kernel, where the existing line names the same one."""
    number = next((name for name in ("solidx", "kernelId") if name in there), "")
    same = number and there.get("kernelName") == cells["kernelName"] and cells[number] == "0"
    return {number: there[number]} if same else {}


def _is_unchanged(there: Mapping[str, str], line: CsvLine) -> bool:
    """Return whether the existing line names the same kernel and time; the rest of it is left as it is."""
    names = ("libtype", "solidx", "kernelId", "splitK", "kernelName")
    held = line.cells or {}
    same = bool(there) and all(there.get(name) == held.get(name) for name in names)
    return same and seconds_of(there) == seconds_of(held)


def _ways(record: Record) -> list[tuple[NamedKernel | None, float]]:
    """Return the timed kernels of a result, the winner first, by AITER's names or ours."""
    name = _aiters_kernel if _is_aiters(record) else _own_kernel
    ways = [(name(registry.get(Backend, record.config.backend), record.config), record.seconds)]
    if record.library and record.library_seconds is not None and record.library in registry.names(Backend):
        library = name(registry.get(Backend, record.library), None)
        place = 0 if record.winner == record.library else 1
        ways.insert(place, (library, record.library_seconds))
    return ways


def _is_aiters(record: Record) -> bool:
    """Return whether a result is of a GPU that AITER runs on, where a row makes it launch what the row names."""
    return record.target.startswith(TARGETS)


def _aiters_kernel(backend: Backend, config: Config | None) -> NamedKernel | None:
    return backend.named_kernel(config)


def _own_kernel(backend: Backend, config: Config | None) -> NamedKernel | None:
    """Return a kernel by the name of its config; None for a library's own choice without one."""
    if config is None:
        choice = backend.named_kernel(None)
        config = None if choice is None else backend.config_of(choice)
    return None if config is None else NamedKernel(backend.name, config.name, split_k=config.split_k)

"""Tuned records, looked up by problem, target and compute units."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeAlias

from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import LateRefusal, Support
from tritongemm.operations.served_problems import describe_calls, other_layouts
from tritongemm.serving.source_row import SourceRow, padded_ms, same_memory

_Device: TypeAlias = "tuple[str, int]"  # a target and compute units
RowKey: TypeAlias = "tuple[Problem, str, int, bool, int]"
_MOST_NAMED = 4  # sizes or types of rows in a message


def row_key(row: SourceRow) -> RowKey:
    """Return the key of a row: problem, target, compute units, if it is of a table over M, and a shipped row's GPU.

    Rows of one M and of ranges up to that M stand beside each other.
    """
    record = row.record
    return record.problem, record.target, record.compute_units, record.m_from > 0, row.shipped_for


class RecordTable:
    """Tuned records; of two for the same problem, target and compute units the later one counts.

    A record that serves a range of M is found for every M of it, after those of exactly that M, and a row of AITER's
    own files at AITER's padded M after both.

    A record of another number of compute units does not serve a device: the split and the order of a grid follow from
    that number. A record that names none serves every device of its target, after those that name the device's own.
    """

    def __init__(self, rows: Iterable[Record | SourceRow] = ()) -> None:
        placed = (row if isinstance(row, SourceRow) else SourceRow(row) for row in rows)
        self._rows = {row_key(row): row for row in placed}
        self._layouts = {(problem.layout, problem.b.order, problem.scalings) for problem, *_ in self._rows}
        self._by_problem: dict[Problem, dict[_Device, SourceRow]] = {}
        self._ranges: dict[Problem, dict[_Device, list[SourceRow]]] = {}  # by the problem of M 1, by their M
        for (problem, target, units, ranged, _), row in sorted(self._rows.items(), key=lambda item: item[0][0].m):
            if ranged:
                self._ranges.setdefault(problem.at(1), {}).setdefault((target, units), []).append(row)
            else:
                self._by_problem.setdefault(problem, {})[target, units] = row

    def extend(self, rows: Iterable[Record | SourceRow]) -> RecordTable:
        """Return a table of these records beside those of this one."""
        return RecordTable([*self._rows.values(), *rows])

    def of_gpu(self, arch: str, compute_units: int, memory_gbps: int) -> RecordTable:
        """Return the table of a GPU, where shipped rows serve products of which no other row is for a range of M.

        Args:
            arch: the device's architecture.
            compute_units: how many the device has.
            memory_gbps: bandwidth of its memory, in GB/s.
        """
        own = {
            problem.at(1)
            for problem, target, units, ranged, shipped_for in self._rows
            if ranged and not shipped_for and target == arch and units in (0, compute_units)
        }
        kept = [
            row
            for row in self._rows.values()
            if not row.shipped_for
            or (same_memory(row.shipped_for, memory_gbps) and row.record.problem.at(1) not in own)
        ]
        return self if len(kept) == len(self._rows) else RecordTable(kept)

    def find(self, problem: Problem, arch: str, compute_units: int) -> Record | Support:
        """Return the record of a problem on a device, or why there is none; see `find_row`."""
        row = self.find_row(problem, arch, compute_units)
        return row.record if isinstance(row, SourceRow) else row

    def find_row(self, problem: Problem, arch: str, compute_units: int) -> SourceRow | Support:
        """Return the row of a problem on a device: its own, a range's or a padded M's, or why there is none."""
        row = self._find_row(problem, arch, compute_units)
        return row or LateRefusal(partial(self._why_none, problem, arch, compute_units))

    def _find_row(self, problem: Problem, arch: str, compute_units: int) -> SourceRow | None:
        devices = ((arch, compute_units), (arch, 0))
        found, ranges = self._by_problem.get(problem, {}), self._ranges.get(problem.at(1), {})
        for device in devices:
            row = found.get(device) or _find_range(ranges.get(device, []), problem.m)
            if row is not None:
                return row
        return next(self._padded_rows(problem, devices), None)

    def _padded_rows(self, problem: Problem, devices: Sequence[_Device]) -> Iterator[SourceRow]:
        """Yield the rows of AITER's files that AITER would take for a problem of another M, the first first."""
        for m in padded_ms(problem.m, problem.n):
            found = self._by_problem.get(problem.at(m), {})
            yield from (found[device] for device in devices if device in found and found[device].padded)

    def _why_none(self, problem: Problem, arch: str, compute_units: int) -> str:
        found, ranges = self._by_problem.get(problem, {}), self._ranges.get(problem.at(1), {})
        others = sorted(units for target, units in found if target == arch)
        if others:
            tuned_on = ", ".join(map(str, others))
            return f"{problem.key} was tuned on {tuned_on} compute units; the device has {compute_units}"
        targets = sorted({target or "no target named" for target, _ in found})
        if targets:
            return f"{problem.key} was tuned for {', '.join(targets)}; the device is {arch}"
        held = [row.record for units in (compute_units, 0) for row in ranges.get((arch, units), [])]
        if held:
            spans = f"{min(r.m_from for r in held)} to {max(r.problem.m for r in held)}"
            return f"{problem.key} was never tuned for {arch}; the table over M has {spans}, and not this one"
        possible = (
            other_layouts(problem) if self._layouts - {(problem.layout, problem.b.order, problem.scalings)} else ()
        )
        known = (other for other in possible if self._find_row(other, arch, compute_units))
        also = "".join(f"; {other.key} was, which serves {describe_calls(other)}" for other in known)
        return f"{problem.key} was never tuned for {arch}{also or self._other_rows(problem, arch, compute_units)}"

    def _other_rows(self, problem: Problem, arch: str, compute_units: int) -> str:
        """Return of which M a product's rows are, or of which types those of its N and K, for a message."""
        sizes = sorted({row.record.problem.m for row in self.near_rows(problem, arch, compute_units)})
        names = [f"M {m}" for m in sizes]
        if not self.devices_of(problem):
            alike = {p for p in self._by_product if (p.n, p.k) == (problem.n, problem.k)}
            names = sorted({p.key.partition("_")[2] for p in alike - set(map(_product, other_layouts(problem)))})
        left = len(names) - _MOST_NAMED
        more = f" and {left} other{'s'[: left > 1]}" if left > 0 else ""
        return f"; rows of this N x K are of {', '.join(names[:_MOST_NAMED])}{more}" if names else ""

    def devices_of(self, problem: Problem) -> list[tuple[str, int]]:
        """Return the targets and compute units that the rows of a product are of, whatever their M."""
        records = [row.record for row in self._by_product.get(_product(problem), [])]
        return sorted({(record.target, record.compute_units) for record in records})

    def near_rows(self, problem: Problem, arch: str, compute_units: int) -> list[SourceRow]:
        """Return the rows of a product at any M that serve a device: of its M and more, then less, nearest first.

        How the rows of groups were spread does not count.
        """
        size = problem.group_m

        def order(row: SourceRow) -> tuple[bool, int, bool]:
            own = row.record.problem.group_m
            return own < size, abs(own - size), row.record.compute_units == 0

        found = self._by_product.get(_product(problem), [])
        return sorted(
            (row for row in found if row.record.target == arch and row.record.compute_units in (0, compute_units)),
            key=order,
        )

    @cached_property
    def _by_product(self) -> dict[Problem, list[SourceRow]]:
        """Return all rows of each product, whatever their M."""
        found: dict[Problem, list[SourceRow]] = {}
        for row in self._rows.values():
            found.setdefault(_product(row.record.problem), []).append(row)
        return found

    def list_rows(self, arch: str, compute_units: int) -> list[SourceRow]:
        """Return the rows that serve a device, one for a problem and one for a range of M."""
        found: dict[tuple[Problem, bool], SourceRow] = {}
        for units in (0, compute_units):
            for (problem, *device, ranged, _), row in self._rows.items():
                if device == [arch, units]:
                    found[problem, ranged] = row
        return list(found.values())

    def list_records(self, arch: str, compute_units: int) -> list[Record]:
        """Return the records of `list_rows`."""
        return [row.record for row in self.list_rows(arch, compute_units)]


def _product(problem: Problem) -> Problem:
    """Return what the problems of one product agree in, whatever their M and the spread of groups' rows."""
    if problem.groups is None:
        return problem.at(1)
    groups = problem.groups
    return replace(problem, m=1, groups=Groups(groups.count, min(groups.room, 1)))


def _find_range(rows: Sequence[SourceRow], m: int) -> SourceRow | None:
    """Return the first of the rows, in the order of M, whose range has this M; None where none has.

    Ranges of several files may overlap, so the next one up may begin above this M.
    """
    at = bisect_left(rows, m, key=lambda row: row.record.problem.m)
    return next((row for row in rows[at:] if row.record.serves(m)), None)

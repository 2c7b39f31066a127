"""Tuned records, looked up by problem, target and compute units."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tritongemm.core.errors import DamagedFileWarning, InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import Support


class RecordTable:
    """Tuned records; of two for the same problem, target and compute units the later one counts.

    A record that serves a range of M is found for every M of it, after those of exactly that M.

    A record of another number of compute units does not serve a device: the split and the order of a grid follow from
    that number. A record that names none serves every device of its target, after those that name the device's own.

    Args:
        records: the records.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._by_problem: dict[Problem, dict[tuple[str, int], Record]] = {}
        for record in records:
            self._by_problem.setdefault(record.problem, {})[record.target, record.compute_units] = record
        self._ranges: dict[Problem, dict[tuple[str, int], list[Record]]] = {}  # by the problem of M 1, by their M
        for problem in sorted(self._by_problem):
            for device, record in self._by_problem[problem].items():
                if record.m_from:
                    self._ranges.setdefault(_any_m(problem), {}).setdefault(device, []).append(record)

    def extend(self, records: Iterable[Record]) -> RecordTable:
        """A table of these records beside those of this one."""
        return RecordTable([*(r for found in self._by_problem.values() for r in found.values()), *records])

    def find(self, problem: Problem, arch: str, compute_units: int) -> Record | Support:
        """The record of a problem on a device, its own or that of a range of M, or why there is none.

        Args:
            problem: what is asked for.
            arch: the device's architecture, which is its target's name.
            compute_units: how many the device has.
        """
        found, ranges = self._by_problem.get(problem, {}), self._ranges.get(_any_m(problem), {})
        for device in ((arch, compute_units), (arch, 0)):
            record = found.get(device) or _find_range(ranges.get(device, []), problem.m)
            if record is not None:
                return record
        others = sorted(units for target, units in found if target == arch)
        if others:
            tuned_on = ", ".join(map(str, others))
            return Support(f"{problem.key} was tuned on {tuned_on} compute units; this GPU has {compute_units}")
        targets = sorted({target or "no target named" for target, _ in found})
        if targets:
            return Support(f"{problem.key} was tuned for {', '.join(targets)}; this GPU is {arch}")
        known = [
            r
            for (target, units), held in ranges.items()
            if target == arch and units in (compute_units, 0)
            for r in held
        ]
        if known:
            spans = f"{min(r.m_from for r in known)} to {max(r.problem.m for r in known)}"
            return Support(f"{problem.key} was never tuned for {arch}; the table over M has {spans}, and not this one")
        return Support(f"{problem.key} was never tuned for {arch}")

    def list_records(self, arch: str, compute_units: int) -> list[Record]:
        """The records that serve a device, one for a problem."""
        found = [self.find(problem, arch, compute_units) for problem in self._by_problem]
        return [record for record in found if isinstance(record, Record)]


def _any_m(problem: Problem) -> Problem:
    return replace(problem, m=1)


def _find_range(records: Sequence[Record], m: int) -> Record | None:
    """Of records in the order of their M, the one whose range has this M; None where none has."""
    at = bisect_left(records, m, key=lambda record: record.problem.m)
    return records[at] if at < len(records) and records[at].serves(m) else None


def read_records(source: str | os.PathLike[str] | Iterable[Record]) -> list[Record]:
    """The records in a file of any known format, or those given. A warning tells of damaged rows, which do not serve.

    Raises:
        InputError: the file can't be read as a whole, or holds no tuned result.
    """
    if not isinstance(source, str | os.PathLike):
        return list(source)
    from tritongemm.formats import Defaults
    from tritongemm.workloads.sizes import from_results

    found = from_results(Path(source), Defaults())
    records = [row.record for row in found.rows if row.record is not None]
    if not records:
        found.require_undamaged()
        raise InputError(f"{source}: holds sizes but no tuned result; tune it first")
    if found.damaged:
        warnings.warn(found.tell_damaged(), DamagedFileWarning, stacklevel=4)  # at the call of `load`
    return records

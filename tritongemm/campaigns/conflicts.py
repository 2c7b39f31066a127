"""Conflicts between two campaigns' results, and stores those that raced again, so that a killed merge resumes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tritongemm.campaigns.measuring import MeasuringTools
from tritongemm.campaigns.served_kernel import served_config
from tritongemm.core.problem import Problem
from tritongemm.core.record import SCHEMA, Record
from tritongemm.results import journal
from tritongemm.runtime.machine import toolchain

RACES = "merging.journal"  # in the campaign's folder while its results are merged
_RACED = "raced"  # a note of a record in it: the kernels that raced
_Key: TypeAlias = "tuple[Problem, int, tuple[str, ...]]"


@dataclass(frozen=True)
class Conflict:
    """Two results of one problem on one kind of device, that serve different kernels.

    Attributes:
        mine: of the first file.
        theirs: of the second.
    """

    mine: Record
    theirs: Record

    @property
    def both(self) -> tuple[Record, Record]:
        """Both results, the first file's first."""
        return self.mine, self.theirs

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the two kernels; a library's own choice has the library's."""
        return tuple(r.winner if (config := served_config(r)) is None else config.name for r in self.both)

    def by_record(self) -> Record:
        """Return the better result as recorded: measured before predicted, then the faster; else the first file's."""
        return min(self.both, key=lambda r: (r.predicted, r.served_seconds))


class RaceLog:
    """Results of conflicts that raced again; a log of another toolchain, device or protocol is set aside.

    Args:
        path: the journal.
        tools: what measures.

    Raises:
        OutputError: it can't be written, or is another program's file.
    """

    def __init__(self, path: Path, tools: MeasuringTools) -> None:
        self._journal, lines = journal.resume(path, _describe(tools))
        self._raced = dict(_keyed(line.value) for line in lines if line.kind == "record")

    def find(self, conflict: Conflict) -> Record | None:
        """Return the result of a conflict's race; None where it has not raced."""
        return self._raced.get((conflict.mine.problem, conflict.mine.compute_units, conflict.kernels))

    def add(self, conflict: Conflict, result: Record) -> None:
        """Store the result of a race, on disk when this returns.

        Raises:
            OutputError: it is not.
        """
        marked = replace(result, notes={**result.notes, _RACED: list(conflict.kernels)})
        self._journal.append([{"record": marked.to_json()}])

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def _describe(tools: MeasuringTools) -> dict[str, Any]:
    """Return the header of the log, which must agree for a merge to resume."""
    target = tools.machine.target
    header = {"target": target.name, "compute_units": target.compute_units, "toolchain": toolchain(tools.machine)}
    return header | {"protocol": asdict(tools.protocol), "schema": SCHEMA}


def _keyed(marked: Record) -> tuple[_Key, Record]:
    """Return a result of the log without its mark, and the key of its conflict."""
    notes = dict(marked.notes)
    kernels = notes.pop(_RACED, ())
    names = tuple(map(str, kernels)) if isinstance(kernels, (list, tuple)) else ()
    return (marked.problem, marked.compute_units, names), replace(marked, notes=notes)

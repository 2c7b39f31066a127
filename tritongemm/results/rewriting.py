"""Replaces rows of a results file by others of the same problems; all else in it stays as it is."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.trial import Trial
from tritongemm.formats import format_of, read_text, results_format
from tritongemm.results import journal
from tritongemm.results.run_files import RunFiles
from tritongemm.system import files

RowPlace: TypeAlias = tuple[Problem, str, int, int]  # a problem, a target, compute units, and the least M


def place_of(record: Record) -> RowPlace:
    """Return what distinguishes a row of a file from its others."""
    return record.problem, record.target, record.compute_units, record.m_from


class HeldRows:
    """The rows of a results file, locked against other programs; each is on the disk when it has been replaced."""

    def __init__(self, path: Path) -> None:
        self._files, ours = RunFiles(path), results_format()
        self._lines: dict[int, tuple[Record, str]] = {}  # by the id of a record, which lives as long as its entry here
        self._files.hold()
        try:
            text = read_text(path)
            if format_of(path, text) is not ours:
                raise InputError(f"{path}: rows are replaced in {ours.title} alone; tritongemm convert makes it")
            rows = ours.read_results(path, text).rows
            self._records = [row.record for row in rows if row.record is not None]
            if len(self._records) < len(rows):
                raise InputError(f"{path}: it holds sizes without a result, which would be lost; tune them first")
        except BaseException:
            self._files.release()
            raise

    def has(self, record: Record) -> bool:
        """Return whether a row is still what was read of it."""
        return record in self._records

    def replace(self, before: Record, after: Record) -> Support:
        """Put a result in the place of another one."""
        changed = [after if place_of(record) == place_of(before) else record for record in self._records]
        files.atomic_write(self._files.results, results_format().write(()) + "".join(map(self._line, changed)))
        self._records = changed
        return SUPPORTED

    def _line(self, record: Record) -> str:
        """Return a result's line, cached, as files of thousands of results are written again and again."""
        if id(record) not in self._lines:
            self._lines[id(record)] = record, results_format().write([record]).splitlines(keepends=True)[-1]
        return self._lines[id(record)][1]

    def close(self) -> None:
        """Let others write the file."""
        self._files.release()


def read_trials(path: Path, problems: Collection[Problem]) -> dict[Problem, list[Trial]]:
    """Return the trials in the journal of a results file for some problems; none where there is no journal."""
    found: dict[Problem, list[Trial]] = {}
    for line in journal.read(RunFiles(path).journal).lines.values():
        if line.kind != "trial" or line.value[0] not in problems:
            continue
        problem, trial = line.value
        with suppress(InputError, KeyError, TypeError, ValueError):  # one that can't be read is no neighbour
            found.setdefault(problem, []).append(trial.read())
    return found

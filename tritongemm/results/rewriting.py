"""Rows of a results file are replaced by others of the same results; all else in it stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tritongemm.core import files
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.formats import format_of, read_text, results_format
from tritongemm.results import journal
from tritongemm.results.run_files import RunFiles
from tritongemm.results.schema import UnreadTrial

RowPlace: TypeAlias = "tuple[Problem, str, int, int]"  # a problem, a target, compute units, and the least M


def place_of(record: Record) -> RowPlace:
    """What tells a row of a file from its others."""
    return record.problem, record.target, record.compute_units, record.m_from


def replace_rows(path: Path, changed: Mapping[RowPlace, Record]) -> None:
    """Replace rows of a results file that nobody else writes meanwhile.

    Args:
        path: the file, in the format of our results.
        changed: by the places of the rows that they replace.

    Raises:
        InputError: it is of another format, or a row is damaged or no result.
        OutputError: it can't be written, or a run holds it; what was there still is.
    """
    run_files, ours = RunFiles(path), results_format()
    run_files.hold()
    try:
        text = read_text(path)
        if format_of(path, text) is not ours:
            raise InputError(f"{path}: rows are replaced in {ours.title} alone; python -m tritongemm.convert makes it")
        found = ours.read_results(path, text)
        records = [row.record for row in found.rows if row.record is not None]
        if len(records) < len(found.rows):
            raise InputError(f"{path}: it holds sizes without a result, which would be lost; tune them first")
        kept = [changed.get(place_of(record), record) for record in records]
        files.atomic_write(run_files.results, ours.write_results(kept, found.schema, found.newer))
    finally:
        run_files.release()


def read_trials(path: Path, problems: Collection[Problem]) -> dict[Problem, list[Trial]]:
    """What the journal of a results file says was tried for some problems; nothing where there is no journal.

    Raises:
        OutputError: it can't be read, or is another program's.
    """
    found: dict[Problem, list[Trial]] = {}
    for line in journal.read(RunFiles(path).journal).lines.values():
        if line.kind != "trial" or line.value[0] not in problems:
            continue
        problem, trial = line.value
        with suppress(InputError, KeyError, TypeError, ValueError):  # one that can't be read is no neighbour
            found.setdefault(problem, []).append(trial.read() if isinstance(trial, UnreadTrial) else trial)
    return found

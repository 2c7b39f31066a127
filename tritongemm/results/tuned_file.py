"""Stage: results → a file of another tool's format, beside what that tool has written there.

Our own results stay in a YAML file with all that is known of them; the other file holds what its tool can run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path, PurePath

from tritongemm.core.errors import InputError, OutputError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, Translation
from tritongemm.core.problem import DEFAULT_FAMILY, Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.formats import read_exactly, results_format, why_unrecognised
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Format, ServerFormat, TunerFormat, WritableFormat
from tritongemm.results.store import Store
from tritongemm.system import files, locks

_MOST_FILES = 10_000  # files of a folder with tuned tables
_ADVICE = "choose another file with -o"


def output_format(path: Path, name: str = "") -> WritableFormat:
    """Return the format in which results are written in a file."""
    translating = registry.every(WritableFormat)
    if name:
        named = registry.get(Format, name)
        if not isinstance(named, WritableFormat):
            raise InputError(f"--to {name}: {named.title} can't hold results; these can: {_names(translating)}")
        return named
    text = read_exactly(path) if os.path.isfile(path) else ""
    claimed = [f for f in translating if f.recognises(path, text)]
    suffixed = [] if text.strip() else [f for f in translating if path.suffix in f.suffixes]
    found = claimed or suffixed
    if len(found) != 1:
        which = "none of the formats that can hold results is" if not found else "several formats may be"
        raise InputError(f"{path}: {which} meant; name one by --to: {_names(found or translating)}")
    return found[0]


def _names(formats: Iterable[Format]) -> str:
    return ", ".join(f.name for f in formats)


def held(path: Path) -> AbstractContextManager[None]:
    """Lock a file, or the files of a folder, against other processes of this package, so that no results are lost."""
    return locks.held(path, _ADVICE)


def write(
    path: Path,
    format_: WritableFormat,
    records: Iterable[Record],
    base: str | None = None,
    rows: Sequence[FormatRow] = (),
    family: str = "",
) -> Translation:
    """Write results to a file, or to the folder of a format that keeps one; each file is replaced at once.

    `base` is what stands in the file; None for what does now. `rows` asked for the results. `family` is what files
    compute that do not say it, as the user says, or "".
    """
    before = dict(_texts(path, format_)) if base is None else {"": base}
    asked, others = list(records), []
    if isinstance(format_, TunerFormat):
        reasons = [format_.why_not_in(path, before.get("", ""), family, record) for record in asked]
        others = [(record, reason) for record, reason in zip(asked, reasons, strict=True) if reason]
        asked = [record for record, reason in zip(asked, reasons, strict=True) if not reason]
    translation = format_.translate_rows(rows, asked, before)
    translation = replace(translation, omitted=(*translation.omitted, *others))
    for name, text in translation.files.items():
        if name and PurePath(name).name != name:
            raise OutputError(f"{path}: {name!r} is no name of a file in it")
        place = path / name if name else path
        if text and text != read_exactly(place):
            files.atomic_write(place, text)
    return translation


def _texts(path: Path, format_: Format) -> Iterator[tuple[str, str]]:
    """Yield the files of a format in a folder, or the one file, with their names in `Format.translate`."""
    if not path.is_dir():
        yield "", read_exactly(path)
        return
    for count, found in enumerate(sorted(path.iterdir())):
        if count >= _MOST_FILES:
            raise InputError(f"{path} holds more than {_MOST_FILES} files; name another folder")
        if found.is_file() and format_.recognises(found, ""):
            yield found.name, read_exactly(found)


class TunedFile:
    """The file of another tool's format to which a tuning run writes."""

    def __init__(self, path: Path, format_: WritableFormat) -> None:
        self.path, self._format = path, format_
        self.place = path.parent if isinstance(format_, ServerFormat) else path  # that is written
        self.results = path.with_suffix(results_format().suffixes[0])

    @classmethod
    def find(cls, path: Path, name: str = "") -> TunedFile | None:
        """Return the file at a path; None where neither its name nor its beginning is another tool's of results."""
        ours = results_format()
        if path.suffix in ours.suffixes:
            return None
        text = read_exactly(path) if os.path.isfile(path) else ""
        if name:
            format_ = output_format(path, name)
            if text and not format_.recognises(path, text):
                fault = why_unrecognised(path, text) or f"{path} is there and is not {format_.title}"
                raise InputError(f"{fault}; or {_ADVICE}")
            return cls(path, format_)
        translating = [f for f in registry.every(WritableFormat) if f is not ours]
        claimed = next((f for f in translating if f.recognises(path, text)), None)
        is_other = claimed is None and text and path.suffix in {suffix for f in translating for suffix in f.suffixes}
        if is_other and (fault := why_unrecognised(path, text)):
            raise InputError(f"{fault}; or {_ADVICE}")
        return cls(path, claimed) if claimed else None

    def check(self) -> None:
        """Refuse a path that can't be written, before hours are spent."""
        files.check_place(self.path, lambda start: True, "results", _ADVICE)

    def wanted(
        self, rows: Sequence[FormatRow], source: Path | None, target: Target, again: bool, family: str = ""
    ) -> tuple[list[FormatRow], Sequence[DamagedRow]]:
        """Return which of the rows that the user asks for are to be tuned, and the rows of the file that can't be used.

        Of rows from this file itself (`source`) those of the run's device count alone. `again` tunes also what the file
        has already. `family` is that of the file, where it does not say, or "". A file that is all of another target
        is refused.
        """
        if source is not None and files.are_one(source, self.path):
            here = (target.name, target.compute_units)
            rows = [row for row in rows if (row.target, row.compute_units) in (("", 0), here)]
        text = read_exactly(self.path)
        if not text.strip():
            return list(rows), ()
        there = self._format.read_usable(
            self.path, text, Defaults(fp8_encoding=target.fp8, family=family or DEFAULT_FAMILY)
        )
        of_file = {row.target for row in there.rows} - {""}
        if of_file and target.name not in of_file and not isinstance(self._format, ServerFormat | TunerFormat):
            raise InputError(f"{self.path} is of {', '.join(of_file)}, not of {target.name}; {_ADVICE}")
        if again:
            return list(rows), ()
        known = {r.problem for r in there.rows if (r.target, r.compute_units) == (target.name, target.compute_units)}
        # A row of several products must be complete.
        asked = {row.number for row in rows if row.subject and row.problem not in known}
        return [r for r in rows if (r.number in asked if r.subject else r.problem not in known)], there.damaged

    def arrange(self) -> None:
        """Sort the rows as the other tool does."""
        with held(self.place):
            text = read_exactly(self.path)
            arranged = self._format.arrange(text) if text and isinstance(self._format, TunerFormat) else text
            if arranged != text:
                files.atomic_write(self.path, arranged)

    def write(
        self, store: Store, problems: Iterable[Problem], rows: Sequence[FormatRow] = (), family: str = ""
    ) -> Translation:
        """Write the results of some problems."""
        records = [record for problem in problems for record in _records_of(store, problem, self._format)]
        with held(self.place):
            return write(self.place, self._format, records, rows=rows, family=family)


def _records_of(store: Store, problem: Problem, format_: WritableFormat) -> Iterator[Record]:
    """Yield a problem's result, then those of its finalists that other tools have, or that the format can express."""
    best = store.record(problem)
    if best is None:
        return
    yield best
    for trial in store.trials(problem).values():
        is_written = trial.config == best.config and best.winner == best.config.backend
        if trial.stage != "final" or trial.status != "ok" or not trial.samples or is_written:
            continue
        backend = registry.get(Backend, trial.config.backend)
        is_servers = isinstance(format_, ServerFormat) and format_.can_express(trial.config)
        if is_servers or backend.named_kernel(trial.config) is not None:
            yield replace(
                best, config=trial.config, winner=trial.config.backend, seconds=trial.seconds, spread=trial.spread,
                error=trial.error, tolerance=trial.tolerance, library="", library_seconds=None, tie=False,
            )  # fmt: skip

"""Stage: trials and records → journal and results file.

A run appends every trial and record to `<output>.journal`, a line of JSON each, fsynced, and replaces the results file
as a whole when it ends. A kill at any moment loses at most the line being written; the same command goes on from there.

The journal stays when a run is done: the next run of the same command finds everything done, and one with more
candidates needs only those. The results file is the truth for what was merged into it (so a row taken out by hand is
measured again), the journal for what was not, or for all if there is no results file.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from tritongemm.core import files
from tritongemm.core.errors import InputError, NewerVersionWarning, OutputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.formats import ResultsFile, read_text, results_format
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format
from tritongemm.results import journal
from tritongemm.results.journal import Journal
from tritongemm.results.schema import SCHEMA

# Names that end so are other kinds of files, and a user who writes one expects that kind.
_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".xlsx", ".html", ".md", ".py", ".so", ".co", ".hsaco", ".cubin")


def check_output_name(path: Path) -> None:
    """Refuse a name that says another kind of file than results are.

    Raises:
        OutputError: says what to write instead.
    """
    ours = results_format()
    others = {suffix for f in registry.every(Format) for suffix in f.suffixes} - set(ours.suffixes)
    suffix = path.suffix.lower()
    if suffix in others or suffix in _OTHER_SUFFIXES:
        also = "; a CSV of every candidate is written by --profile_file" if suffix == ".csv" else ""
        raise OutputError(
            f"-o {path}: results are written as YAML, not as {suffix}; write -o {path.with_suffix('.yaml')}{also}"
        )


class Store:
    """The results of one output file, held by one run at a time; `open` makes it. Threads may share it."""

    def __init__(self, path: Path, header: dict[str, Any], lock: FileLock, resumed: bool) -> None:
        self.path, self.header, self._resumed = path, header, resumed
        self._file = _file(path)
        self.journal = _beside(path, ".journal")
        self._lock, self._guard = lock, threading.RLock()
        self._kept: dict[Problem, list[Record]] = {}  # rows of the results file, in its order
        self._newer = ResultsFile()  # rows of it that only a newer version can use
        self._newer_lines: list[dict[str, Any]] = []  # lines of the journal that only it can use, and has not merged
        self._records: dict[Problem, Record] = {}  # results that go before the rows
        self._trials: dict[Problem, dict[tuple[str, str], Trial]] = {}
        self._order: dict[Problem, None] = {}  # problems in the order that merges were asked for
        self._unmerged = False
        self._lines: Journal | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        target: str,
        toolchain: dict[str, str],
        protocol: dict[str, Any],
        resume: bool = True,
        problems: Collection[Problem] | None = None,
        compute_units: int = 0,
    ) -> Store:
        """Take an output file.

        Args:
            path: the results file, there or not.
            target: architecture of this run.
            toolchain: versions of this run; ``device`` names the GPU that it measures on.
            protocol: how it measures; trials taken otherwise are not continued.
            resume: go on from what is there; otherwise set the journal aside and measure anew. Rows of the results file
                stay until they are replaced.
            problems: rows of others may have been made by another toolchain; None: none may.
            compute_units: of the device of this run; 0 where that is not said.

        Raises:
            OutputError: not writable, held by another run, made for another target, GPU, toolchain or protocol, or its
                name says that it is no YAML.
            InputError: the results file that is there can't be read.
        """
        check_output_name(path)
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file with -o")
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file that can be replaced; name another with -o")
        lock = FileLock(_beside(path, ".lock"), thread_local=False)
        try:
            _file(path).parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(lock.lock_file, os.O_RDWR | os.O_CREAT, 0o666))  # says why not; the lock itself does not
            lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"{path} is held by another run ({_holder(path)}); wait for it, or choose another -o"
            ) from None
        except OSError as error:
            raise OutputError(f"{path} can't be written: {error.strerror}; choose another file with -o") from error
        header: dict[str, Any] = {"target": target, "toolchain": toolchain, "protocol": protocol}
        header |= {"compute_units": compute_units} if compute_units else {}
        store = cls(path, {**header, "schema": SCHEMA}, lock, resume)
        try:
            files.sweep(store._file)
            store._read_results(problems)
            store._read_journal()
            with suppress(OSError):  # it only serves the message to a second run
                _beside(path, ".pid").write_text(str(os.getpid()))
        except BaseException:
            store.close()
            raise
        return store

    def _read_results(self, problems: Collection[Problem] | None) -> None:
        if not self._file.exists() or not self._file.stat().st_size:
            return
        results = results_format().read_results(self.path, read_text(self._file))
        if not results.rows and not results.newer:
            raise InputError(f"{self.path} holds an empty list; name another file with -o")
        tuned = None if problems is None else frozenset(problems)
        for row in results.rows:
            what = f"line {row.line} of {self.path}"
            if row.record is None:
                raise OutputError(f"{self.path}: line {row.line} is not a result; name another file with -o")
            self._belongs(what, row.record.target, row.record.toolchain, row.record.compute_units)
            if tuned is None or row.problem in tuned:
                self._agrees(what, row.record.toolchain)
            self._kept.setdefault(row.problem, []).append(row.record)
        self._newer = results
        if results.newer:
            _warn_of_newer(f"{len(results.newer)} of the rows of {self.path}", results.newer[0].reason)

    def _belongs(self, what: str, target: str, toolchain: dict[str, str], compute_units: int) -> None:
        """Refuse to add to results of another GPU, which --no-resume would mix or replace."""
        if target != self.header["target"]:
            raise OutputError(
                f"{what} is for {target or 'an unnamed target'}, this run for {self.header['target']}: choose "
                "another -o"
            )
        theirs, ours = toolchain.get("device"), self.header["toolchain"].get("device", "no GPU")
        if theirs and theirs != ours:
            raise OutputError(f"{what} was measured on {theirs}, this run has {ours}: choose another -o")
        here = self.header.get("compute_units", 0)
        if compute_units and here and compute_units != here:
            raise OutputError(
                f"{what} is for a device of {compute_units} compute units, this run has {here}: choose another -o"
            )

    def _agrees(self, what: str, toolchain: dict[str, str]) -> None:
        """Refuse to go on from results of another toolchain."""
        moved = _moved(toolchain, self.header["toolchain"], "unknown")
        if moved and self._resumed:
            raise OutputError(
                f"{what} was made by another toolchain ({moved}): choose another -o, or measure these sizes anew with "
                "--no-resume"
            )

    def _read_journal(self) -> None:
        lines, size = journal.read(self.journal)
        reasons: list[str] = []
        for line in journal.parsed(self.journal, lines, strict=self._resumed):
            if line.kind == "header":
                self._continues(line.value)
            elif line.kind == "record":
                self._records[line.value.problem], self._unmerged = line.value, True
            elif line.kind == "trial":
                problem, trial = line.value
                self._trials.setdefault(problem, {})[trial.config.name, trial.stage] = trial
            elif line.kind == "newer":
                reasons.append(line.reason)
                if "record" in line.value:
                    self._newer_lines.append(line.value)
            else:
                self._order.update(dict.fromkeys(line.value))
                self._unmerged = False
                if self._file.exists() or not self._resumed:
                    self._records.clear()
                    self._newer_lines.clear()
        if reasons:
            _warn_of_newer(f"{len(reasons)} of the lines of {self.journal}", reasons[0])
        if lines and not self._resumed:
            self._set_aside()
            size = 0
        self._lines = Journal(self.journal, size)
        if not size:
            self._append([{"header": self.header}, *self._newer_lines])

    def _continues(self, header: dict[str, Any]) -> None:
        what = str(self.journal)
        self._belongs(what, header["target"], header["toolchain"], header.get("compute_units", 0))
        self._agrees(what, header["toolchain"])
        changed = _moved(header["protocol"], self.header["protocol"], "None")
        if changed and self._resumed:
            raise OutputError(
                f"{what} was measured otherwise ({changed}): use the same options, another -o, or --no-resume"
            )

    def _set_aside(self) -> None:
        """Begin a new journal. Results that only the old one holds are merged first: there is but one .old."""
        if self._records:
            self._replace(self._ordered(()))
        self._records, self._trials, self._order, self._unmerged = {}, {}, {}, False
        try:
            os.replace(self.journal, _beside(self.path, ".journal.old"))
        except OSError as error:
            raise OutputError(f"{self.journal} can't be set aside: {error.strerror}; choose another -o") from error

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        if self._lines is None:
            raise OutputError(f"{self.path} was given back; nothing can be added to it")
        self._lines.append(entries)

    def add_trials(self, problem: Problem, trials: Sequence[Trial], record: Record | None = None) -> None:
        """Append trials of one problem and, if given, the result they decide; all are on disk when this returns.

        Raises:
            OutputError: they are not, e.g. because the disk is full.
        """
        lines: list[dict[str, Any]] = [{"problem": problem.to_json(), "trial": t.to_json()} for t in trials]
        with self._guard:
            self._append([*lines, {"record": record.to_json()}] if record else lines)
            self._trials.setdefault(problem, {}).update({(t.config.name, t.stage): t for t in trials})
            if record:
                self._records[problem], self._unmerged = record, True

    def add_record(self, record: Record) -> None:
        """Append a result by itself; as `add_trials`."""
        self.add_trials(record.problem, (), record)

    def trials(self, problem: Problem) -> dict[tuple[str, str], Trial]:
        """What is known of a problem's candidates, by config name and stage."""
        with self._guard:
            return dict(self._trials.get(problem, {}))

    def record(self, problem: Problem) -> Record | None:
        """The result that needs no more measuring, or None."""
        with self._guard:
            if problem in self._records:
                return self._records[problem]
            rows = self._kept.get(problem, []) if self._resumed else []
            place = self._place(rows)
            if rows and not self.header.get("compute_units", 0):
                place = min(place, len(rows) - 1)  # a run that does not say how large its device is takes any
            row = rows[place] if place < len(rows) else None
        return row if row and row.toolchain == self.header["toolchain"] else None

    def records(self) -> list[Record]:
        """Every result of this file, the run's own and those that were there."""
        with self._guard:
            return [record for rows in self._held().values() for record in rows]

    def merge(self, order: Sequence[Problem] = ()) -> None:
        """Replace the results file: rows that were there keep their place, new ones follow in the order given.

        Raises:
            OutputError: it can't be written; the old one and the journal are as they were.
        """
        with self._guard:  # held to the end: a record that comes now must not be marked as merged
            rows = self._ordered(order)
            sequence = dict.fromkeys([*self._order, *self._kept, *order, *rows])
            new = [p for p in sequence if p not in self._order]
            if not rows or not (new or self._unmerged or not self._file.exists()):
                return
            self._replace(rows)
            # The order of problems still to come is kept as well, so that an interrupted run ends with the same file.
            # A newer version takes records before this line for merged, so those that only it can use follow once more.
            self._append([{"merged": [p.to_json() for p in new]}, *self._newer_lines])
            self._order, self._unmerged = sequence, False

    def _place(self, rows: Sequence[Record]) -> int:
        """Where this run's result belongs among a problem's rows, which may be of devices of several sizes."""
        here = self.header.get("compute_units", 0)
        sizes = [record.compute_units for record in rows]
        return next((sizes.index(size) for size in (here, 0) if size in sizes), len(rows))

    def _held(self) -> dict[Problem, list[Record]]:
        """The rows of the file with this run's results in their places, then its other results."""
        held = {problem: list(rows) for problem, rows in self._kept.items()}
        for problem, record in self._records.items():
            rows = held.setdefault(problem, [])
            place = self._place(rows)
            rows[place : place + 1] = [record]
        return held

    def _ordered(self, order: Sequence[Problem]) -> dict[Problem, list[Record]]:
        held = self._held()
        sequence = dict.fromkeys([*self._order, *self._kept, *order, *sorted(held)])
        return {p: held[p] for p in sequence if p in held}

    def _replace(self, rows: dict[Problem, list[Record]]) -> None:
        records = [record for same in rows.values() for record in same]
        text = results_format().write_results(records, self._newer.schema, self._newer.newer)
        advice = f"its journal {self.journal} is safe. Make room and run the same command again"
        files.atomic_write(self._file, text, advice)
        self._kept = rows

    def close(self) -> None:
        """Give the output file back; a second call does nothing."""
        with self._guard:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
        if self._lock.is_locked:
            with suppress(OSError):
                _beside(self.path, ".pid").unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _file(path: Path) -> Path:
    """Where links lead: a link to the results stays one, and two links to one file share its lock."""
    return Path(os.path.realpath(path))


def run_files(path: Path) -> list[Path]:
    """The files that a run keeps for an output: results, journal and lock."""
    return [_file(path), _beside(path, ".journal"), _beside(path, ".lock")]


def _beside(path: Path, suffix: str) -> Path:
    file = _file(path)
    return file.with_name(file.name + suffix)


def _warn_of_newer(what: str, reason: str) -> None:
    """Say once that a file has more than this version can use."""
    text = f"{what} need a newer version of tritongemm and are kept as they are: {reason}"
    warnings.warn(text, NewerVersionWarning, stacklevel=5)


def _moved(theirs: dict[str, Any], ours: dict[str, Any], absent: str) -> str:
    """What differs, in words."""
    keys = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
    return ", ".join(f"{k} {theirs.get(k, absent)} → {ours.get(k, absent)}" for k in keys)


def _holder(path: Path) -> str:
    try:
        return f"process {_beside(path, '.pid').read_text()}"
    except OSError:
        return "process unknown"

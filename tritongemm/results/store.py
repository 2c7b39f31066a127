"""Stage: trials and records → journal and results file.

A run appends every trial and record to `<output>.journal`, a line of JSON each, fsynced, and replaces the results file
at once when it ends. A kill at any moment loses at most the line being written; the same command goes on from there.

The journal stays when a run is done: the next run of the same command finds everything done, and one with more
candidates needs only those. The results file is the truth for what was merged into it (so a row taken out by hand is
measured again), the journal for what was not, or for all if there is no results file.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tritongemm.core.errors import DamagedFileWarning, InputError, OutputError, TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.formats import read_text, results_format
from tritongemm.results import journal
from tritongemm.results.identity import RunIdentity
from tritongemm.results.journal import Journal
from tritongemm.results.run_files import RunFiles
from tritongemm.results.schema import Line, UnreadTrial
from tritongemm.system import files


class KnownTrials:
    """The trials of a run and of those before it. It has no lock: one thread uses it at a time."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._read: dict[Problem, dict[tuple[str, str], Trial]] = {}
        self._unread: dict[Problem, list[UnreadTrial]] = {}

    def take(self, problem: Problem, trial: UnreadTrial) -> None:
        """Add a trial's line of the journal."""
        self._unread.setdefault(problem, []).append(trial)

    def of(self, problem: Problem) -> dict[tuple[str, str], Trial]:
        """Return the trials of a problem, by config name and stage; the caller may add to the dictionary.

        A line that can't be read is passed over with a warning, so that its candidate is measured again.
        """
        known = self._read.setdefault(problem, {})
        for unread in self._unread.pop(problem, ()):
            try:
                trial = unread.read()
            except (InputError, KeyError, TypeError, ValueError) as error:
                what = f"{self._journal}: a trial of {problem.key} can't be, and is measured again: {error}"
                warnings.warn(what, DamagedFileWarning, stacklevel=3)
                continue
            known[trial.config.name, trial.stage] = trial
        return known


_MOST_NAMED = 20  # numbers of damaged lines in a message


class Store:
    """The results of one output file, held by one run at a time; `open` makes it. Threads may share it."""

    def __init__(self, run_files: RunFiles, identity: RunIdentity) -> None:
        self.path, self.journal = run_files.output, run_files.journal
        self._run_files, self._identity = run_files, identity
        self._file = run_files.results
        self._guard = threading.RLock()
        self._seen = b""  # the text of the results file that this run read or wrote last
        self._kept: dict[Problem, list[Record]] = {}  # rows of the results file, in its order
        self._records: dict[Problem, Record] = {}  # results that go before the rows
        self._trials = KnownTrials(self.journal)
        self._order: dict[Problem, None] = {}  # problems in the order of the merges
        self._unmerged = False
        self._lines: Journal | None = None
        self._opened = time.monotonic()

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
        """Open an output file, there or not, for a run of a target, a toolchain and a protocol.

        With `resume` the run goes on from trials that were taken likewise; otherwise the journal is set aside and all
        is measured anew, while rows of the results file stay until they are replaced. Rows of other than the `problems`
        may have been made by another toolchain; None: none may. `compute_units` are of the run's device; 0 where that
        is not said.

        Raises:
            OutputError: not writable, held by another run, made for another target, GPU, toolchain or protocol, its
                name says that it is no YAML, or a file that the run keeps beside it is another program's.
            InputError: the results file that is there can't be read, or a newer version wrote it or its journal.
        """
        run_files = RunFiles(path)
        run_files.hold()
        store = cls(run_files, RunIdentity(target, toolchain, protocol, compute_units, resume))
        try:
            store._read_results(problems)
            store._read_journal()
        except BaseException:
            store.close()
            raise
        return store

    def _read_results(self, problems: Collection[Problem] | None) -> None:
        self._seen = self._text_of_results()
        if self._seen:
            self._kept = self._rows_of_results(problems)

    def _text_of_results(self) -> bytes:
        """Return the results file as it is now; b"" where there is none."""
        try:
            return files.read_regular(self._file)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputError(f"{self.path} can't be read: {error.strerror}") from error

    def _rows_of_results(self, problems: Collection[Problem] | None) -> dict[Problem, list[Record]]:
        """Return the rows of the results file by their problem."""
        kept: dict[Problem, list[Record]] = {}
        results = results_format().read_results(self.path, read_text(self._file))
        if not results.rows:
            raise InputError(f"{self.path} holds an empty list; name another file with -o")
        tuned = None if problems is None else frozenset(problems)
        for row in results.rows:
            what = f"line {row.line} of {self.path}"
            if row.record is None:
                raise OutputError(f"{self.path}: line {row.line} is not a result; name another file with -o")
            self._identity.require_belongs(what, row.record.target, row.record.toolchain, row.record.compute_units)
            if tuned is None or row.problem in tuned:
                self._identity.require_toolchain(what, row.record.toolchain)
            kept.setdefault(row.problem, []).append(row.record)
        return kept

    def _read_journal(self) -> None:
        read = journal.read(self.journal)
        if self._identity.resumed and 1 in read.damaged:
            raise OutputError(
                f"{self.journal}: line 1, the header, is damaged ({read.damaged[1]}), and it alone states how the rest "
                "was measured: use --no-resume, which sets the journal aside, or choose another -o"
            )
        damaged = dict(read.damaged)
        if not (damaged or any(line.kind == "record" or line.is_timed for line in read.lines.values())):
            headers = (line.value for line in read.lines.values() if line.kind == "header")
            if any(self._identity.foreign(h["target"], h["toolchain"], h.get("compute_units", 0)) for h in headers):
                read = replace(read, lines={}, size=0)  # another target's run, in which nothing was right
        numbers: dict[Problem, int] = {}  # of the lines that hold the results
        for number, line in read.lines.items():
            if line.kind == "record":
                numbers[line.value.problem] = number
            fault = self._take_line(line)
            if fault:
                damaged[number] = fault
        for problem, fault in _unwritable(self._records.values()).items():
            damaged[numbers[problem]] = fault
            del self._records[problem]
        if damaged:
            _warn_of_damage(self.journal, damaged)
        if read.size and not self._identity.resumed:
            self._set_aside()
        begins = not read.size or not self._identity.resumed
        self._lines = Journal(self.journal, 0 if begins else read.size)
        if begins:
            self._append([{"header": self._identity.header()}])

    def _take_line(self, line: Line) -> str:
        """Take a line of the journal; return why it can't be used, or ""."""
        if line.kind == "header":
            self._identity.require_continues(str(self.journal), line.value)
        elif line.kind == "record":
            record: Record = line.value
            foreign = self._identity.foreign(record.target, record.toolchain, record.compute_units)
            if foreign:
                return f"its result {foreign}"
            self._records[record.problem], self._unmerged = record, True
        elif line.kind == "trial":
            self._trials.take(*line.value)
        elif line.kind == "merged":
            self._order.update(dict.fromkeys(line.value))
            self._unmerged = False
            if self._file.exists() or not self._identity.resumed:
                self._records.clear()
        return ""

    def _set_aside(self) -> None:
        """Begin a new journal. Results that only the old one holds are merged first: there is but one .old."""
        if self._records:
            self._replace(self._ordered(()))
        self._records, self._trials, self._order, self._unmerged = {}, KnownTrials(self.journal), {}, False
        try:
            os.replace(self.journal, self._run_files.old_journal)
        except OSError as error:
            raise OutputError(f"{self.journal} can't be set aside: {error.strerror}; choose another -o") from error

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        if self._lines is None:
            raise OutputError(f"{self.path} was given back; nothing can be added to it")
        self._lines.append(entries)

    def add_trials(self, problem: Problem, trials: Sequence[Trial], record: Record | None = None) -> None:
        """Append trials of one problem and, if given, the result they decide; all are on disk when this returns."""
        size = problem.to_json()
        lines: list[dict[str, Any]] = [{"problem": size, "trial": t.to_json()} for t in trials]
        lines += [{"record": record.to_json()}] if record else []
        with self._guard:
            elapsed = round(time.monotonic() - self._opened, 3)
            self._append({**line, "elapsed": elapsed} for line in lines)
            self._trials.of(problem).update({(t.config.name, t.stage): t for t in trials})
            if record:
                self._records[problem], self._unmerged = record, True

    def add_record(self, record: Record) -> None:
        """Append a result by itself; as `add_trials`."""
        self.add_trials(record.problem, (), record)

    def trials(self, problem: Problem) -> dict[tuple[str, str], Trial]:
        """Return the known trials of a problem's candidates, by config name and stage."""
        with self._guard:
            return dict(self._trials.of(problem))

    def record(self, problem: Problem) -> Record | None:
        """Return the result that needs no more measuring, or None."""
        with self._guard:
            if problem in self._records:
                return self._records[problem]
            row = self._own(self._kept.get(problem, []) if self._identity.resumed else [])
        return row if row and row.toolchain == self._identity.toolchain else None

    def records(self) -> list[Record]:
        """Return every result of this file, the run's own and earlier ones."""
        with self._guard:
            return [record for rows in self._held().values() for record in rows]

    def beside(self, problems: Collection[Problem]) -> list[Record]:
        """Return the results of this run's device at other problems, which stay in the file."""
        with self._guard:
            others = [self._own(rows) for problem, rows in self._held().items() if problem not in problems]
        return [record for record in others if record is not None]

    def merge(self, order: Sequence[Problem] = ()) -> None:
        """Replace the results file: earlier rows keep their place, new ones follow in the order given."""
        with self._guard:  # held to the end: a record that comes now must not be marked as merged
            text = self._text_of_results()
            if text not in (b"", self._seen):
                if not self._unmerged:
                    return
                self._take_edits(text)
            rows = self._ordered(order)
            sequence = dict.fromkeys([*self._order, *self._kept, *order, *rows])
            new = [p for p in sequence if p not in self._order]
            if not rows or not (new or self._unmerged or not self._file.exists()):
                return
            self._replace(rows)
            # The order of problems still to come is kept as well, so that an interrupted run ends with the same file.
            self._append([{"merged": [p.to_json() for p in new]}])
            self._order, self._unmerged = sequence, False

    def _take_edits(self, text: bytes) -> None:
        """Take over edits of the results file that were made meanwhile, but for problems that this run has results of.

        A text that can't be read is kept in a file beside, as this run is about to replace it.
        """
        try:
            self._kept = self._rows_of_results(())
        except (InputError, OutputError) as error:
            try:
                kept = files.keep_edited(self._file, text)
            except OSError as fault:
                raise OutputError(
                    f"{self.path} was edited meanwhile and can't be read ({error}), nor can the edited text be kept "
                    f"beside it: {fault.strerror}; the journal {self.journal} is safe. Mend or move {self.path} and "
                    "run the same command again"
                ) from error
            what = f"{self.path} was edited while this run held it, and can't be read: {error}"
            warnings.warn(f"{what}; the edited text is kept in {kept}", DamagedFileWarning, stacklevel=3)
        self._seen = text

    def _own(self, rows: Sequence[Record]) -> Record | None:
        """Return this run's result among a problem's rows; a run without a device's size takes any."""
        place = self._place(rows)
        if rows and not self._identity.compute_units:
            place = min(place, len(rows) - 1)
        return rows[place] if place < len(rows) else None

    def _place(self, rows: Sequence[Record]) -> int:
        """Return the place of this run's result among a problem's rows, which may be of devices of several sizes."""
        here = self._identity.compute_units
        sizes = [record.compute_units for record in rows]
        return next((sizes.index(size) for size in (here, 0) if size in sizes), len(rows))

    def _held(self) -> dict[Problem, list[Record]]:
        """Return the rows of the file with this run's results in their places, then its other results."""
        held = {problem: list(rows) for problem, rows in self._kept.items()}
        for problem, record in self._records.items():
            rows = held.setdefault(problem, [])
            place = self._place(rows)
            rows[place : place + 1] = [record]
        return held

    def _ordered(self, order: Sequence[Problem]) -> dict[Problem, list[Record]]:
        held = self._held()
        sequence = dict.fromkeys(
            [*self._order, *self._kept, *order, *sorted(held, key=lambda p: (p.m, p.n, p.k, p.key))]
        )
        return {p: held[p] for p in sequence if p in held}

    def _replace(self, rows: dict[Problem, list[Record]]) -> None:
        records = [record for same in rows.values() for record in same]
        text = results_format().write(records)
        advice = f"its journal {self.journal} is safe. Make room and run the same command again"
        files.atomic_write(self._file, text, advice)
        self._kept, self._seen = rows, text.encode()

    def close(self) -> None:
        """Unlock the output file; a second call does nothing."""
        with self._guard:
            if self._lines is not None:
                self._lines.close()
                self._lines = None
        self._run_files.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unwritable(records: Collection[Record]) -> dict[Problem, str]:
    """Return why some results can't be rows of a results file, by problem: merged rows must stay readable."""
    try:
        if records:
            ours = results_format()
            ours.read_results(Path("the results"), ours.write(records))
        return {}
    except TritonGemmError as error:
        if len(records) == 1:
            return {record.problem: f"its result can't be a row: {error}" for record in records}
        return {p: fault for record in records for p, fault in _unwritable([record]).items()}


def _warn_of_damage(path: Path, damaged: Mapping[int, str]) -> None:
    """Warn once of the lines of a journal that were skipped."""
    numbers = sorted(damaged)
    named = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", …" if len(numbers) > _MOST_NAMED else "")
    warnings.warn(
        f"{path}: damaged lines ({named}) are passed over, and what they held is measured again. Line {numbers[0]}: "
        f"{damaged[numbers[0]]}",
        DamagedFileWarning,
        stacklevel=5,
    )

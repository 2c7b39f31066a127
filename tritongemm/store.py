"""Stage: Trial, Record → journal and results file.

A run appends every trial and record to `<output>.journal`, a line of JSON each, fsynced; the results file is replaced
as a whole from it. A kill at any moment loses at most the line being written, and the same command goes on from there.
The journal stays when a run is done: it is what makes the next run of the same command quick.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from tritongemm import registry, sizes
from tritongemm.errors import InputError, OutputError
from tritongemm.interop import text_of
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.trial import Trial


class Store:
    """The results of one output file, held by one run at a time; `open` makes it."""

    def __init__(self, path: Path, header: dict[str, Any], lock: FileLock, resumed: bool) -> None:
        self.path, self.header, self._resumed = path, header, resumed
        self.journal = path.with_name(path.name + ".journal")
        self._lock, self._guard = lock, threading.Lock()
        self._kept: dict[Problem, Record] = {}
        self._records: dict[Problem, Record] = {}
        self._trials: dict[Problem, dict[tuple[str, str], Trial]] = {}
        self._out = -1

    @classmethod
    def open(
        cls, path: Path, target: str, toolchain: dict[str, str], protocol: dict[str, Any], resume: bool = True
    ) -> Store:
        """Take an output file.

        Args:
            path: the results file, there or not.
            target: architecture of this run.
            toolchain: versions of this run.
            protocol: how it measures; trials taken otherwise are not continued.
            resume: go on from what is there; otherwise set it aside and measure anew.

        Raises:
            OutputError: not writable, held by another run, or made for another target, toolchain or protocol.
            InputError: the results file that is there can't be read.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise OutputError(f"{path} is a folder; name a file with -o")
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
                pass
        except OSError as error:
            raise OutputError(f"{path} can't be written: {error.strerror}; choose another file with -o") from error
        lock = FileLock(path.with_name(path.name + ".lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"{path} is held by another run ({_holder(path)}); wait for it, or choose another -o"
            ) from None
        store = cls(path, {"target": target, "toolchain": toolchain, "protocol": protocol}, lock, resume)
        try:
            store._read_results()
            store._read_journal()
            path.with_name(path.name + ".pid").write_text(str(os.getpid()))
        except BaseException:
            store.close()
            raise
        return store

    def _read_results(self) -> None:
        if not self.path.exists() or not self.path.stat().st_size:
            return
        reader = registry.load("interop", "tune_gemm")
        text = text_of(self.path)
        for row in reader.read(self.path, text, sizes.Defaults()):
            if row.record is None:
                raise OutputError(f"{self.path}: line {row.line} is not a result; name another file with -o")
            if self._resumed:
                self._agree(f"line {row.line} of {self.path}", row.record.target, row.record.toolchain)
            self._kept[row.problem] = row.record

    def _agree(self, what: str, target: str, toolchain: dict[str, str]) -> None:
        """Refuse to mix results of another target or toolchain into this file."""
        if target != self.header["target"]:
            raise OutputError(
                f"{what} is for {target or 'an unnamed target'}, this run for {self.header['target']}: choose another -o"
            )
        ours = self.header["toolchain"]
        moved = [f"{k} {toolchain.get(k, 'unknown')} → {ours.get(k, 'unknown')}" for k in sorted({*toolchain, *ours})]
        moved = [m for m in moved if m.split(" ", 1)[1].split(" → ")[0] != m.split(" → ")[1]]
        if moved:
            raise OutputError(
                f"{what} was made by another toolchain ({', '.join(moved)}): choose another -o, or measure these sizes "
                "anew with --no-resume"
            )

    def _read_journal(self) -> None:
        if self._resumed and self.journal.exists():
            self._replay(self.journal.read_bytes())
        elif self.journal.exists():
            os.replace(self.journal, self.journal.with_name(self.journal.name + ".old"))
        try:
            self._out = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"{self.journal} can't be written: {error.strerror}") from error
        if os.fstat(self._out).st_size == 0:
            self._append([{"header": self.header}])

    def _replay(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # a line torn by a kill
            os.truncate(self.journal, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                if "header" in entry:
                    self._continue(entry["header"])
                elif "record" in entry:
                    record = Record.from_json(entry["record"])
                    self._records[record.problem] = record
                else:
                    problem, trial = Problem.from_json(entry["problem"]), Trial.from_json(entry["trial"])
                    self._trials.setdefault(problem, {})[trial.config.name, trial.stage] = trial
            except (ValueError, KeyError, TypeError, InputError) as error:
                raise OutputError(
                    f"{self.journal}: line {number} is damaged ({error}); delete that line, or use --no-resume"
                ) from error

    def _continue(self, header: dict[str, Any]) -> None:
        self._agree(str(self.journal), header["target"], header["toolchain"])
        if header["protocol"] != self.header["protocol"]:
            theirs, ours = header["protocol"], self.header["protocol"]
            changed = [
                f"{k} {theirs.get(k)} → {ours.get(k)}" for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)
            ]
            raise OutputError(
                f"{self.journal} was measured otherwise ({', '.join(changed)}): use the same options, another -o, or "
                "--no-resume"
            )

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write whole lines and wait until the disk has them.

        Raises:
            OutputError: it has not; the journal is as it was before.
        """
        data = "".join(json.dumps(e) + "\n" for e in entries).encode()
        if not data:
            return
        with self._guard:
            before = os.fstat(self._out).st_size
            try:
                written = os.write(self._out, data)
                if written < len(data):
                    raise OSError(28, "No space left on device")
                os.fsync(self._out)
            except OSError as error:
                os.ftruncate(self._out, before)
                raise OutputError(
                    f"{self.journal} can't be written: {error.strerror}; what was there before is safe. Make room and "
                    "run the same command again"
                ) from error

    def add_trials(self, problem: Problem, trials: Sequence[Trial]) -> None:
        """Append trials of one problem; they are on disk when this returns."""
        self._append({"problem": problem.to_json(), "trial": t.to_json()} for t in trials)
        held = self._trials.setdefault(problem, {})
        held.update({(t.config.name, t.stage): t for t in trials})

    def add_record(self, record: Record) -> None:
        """Append the result of one problem; it is on disk when this returns."""
        self._append([{"record": record.to_json()}])
        self._records[record.problem] = record

    def trials(self, problem: Problem) -> dict[tuple[str, str], Trial]:
        """What is known of a problem's candidates, by config name and stage."""
        return dict(self._trials.get(problem, {}))

    def record(self, problem: Problem) -> Record | None:
        """The result this journal holds for a problem; a results file without its journal counts as well."""
        if problem in self._records:
            return self._records[problem]
        return self._kept.get(problem) if self._resumed else None

    def records(self) -> list[Record]:
        """Every result of this file, the run's own and those that were there."""
        return list({**self._kept, **self._records}.values())

    def merge(self, order: Sequence[Problem] = ()) -> None:
        """Replace the results file: rows that were there keep their place, new ones follow in the order given."""
        merged = {**self._kept, **{p: self._records[p] for p in order if p in self._records}, **self._records}
        if not merged:
            return
        text = registry.load("interop", "tune_gemm").write(merged.values())
        handle, fresh = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(fresh, 0o644)
            os.replace(fresh, self.path)
        except OSError as error:
            Path(fresh).unlink(missing_ok=True)
            raise OutputError(
                f"{self.path} can't be written: {error.strerror}; its journal {self.journal} is safe"
            ) from error

    def close(self) -> None:
        """Give the output file back."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1
        self.path.with_name(self.path.name + ".pid").unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _holder(path: Path) -> str:
    try:
        return f"process {path.with_name(path.name + '.pid').read_text()}"
    except OSError:
        return "process unknown"

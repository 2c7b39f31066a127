"""Adds up the calls of a log piece by piece: each once, with its count, and remarks about faults."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog
from tritongemm.plugins.contracts.call_logs import LogFault, LoggedCall, LoggedRow
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.printable import printable

MOST_CALLS = 200_000  # different calls, of which a campaign keeps about five kilobytes each
_MOST_REMARKS = 5  # faults with a remark each, and other functions that one remark names
_MOST_NAMES = 1000  # other functions whose calls are counted by name
_SIZE = re.compile(r"^- ?\{ ?['\"]?M['\"]?:", re.MULTILINE)  # how a row of a file of sizes begins


class LoggedCalls:
    """The calls of one log, and remarks.

    Lines of one kind add up, whichever process or run wrote them. Of lines of two kinds the library wrote one each for
    one call, as it does where it is asked for two kinds of log.
    """

    def __init__(self, path: Path, target: Target) -> None:
        self._path = path
        self._logs = registry.every(CallLog)
        self._target = target
        self._architectures = {name: 0 for name in target_files.target_names() if name != target.name}
        # The first row of each call, in the order of the file, and its counts by kinds of lines.
        self.calls: dict[LoggedCall, tuple[LoggedRow, dict[str, float]]] = {}
        self._faults: list[LogFault] = []
        self._more_faults, self._last_fault = 0, 0
        self._others: Counter[str] = Counter()
        self._assumed: Counter[str] = Counter()
        self._sizes, self._first_size = 0, 0
        self._lines = 0  # of the pieces so far

    @property
    def is_log(self) -> bool:
        """Whether any line is of a log."""
        return bool(self.calls or self._faults or self._others)

    def add(self, piece: str) -> None:
        """Add the next lines."""
        read = [log.read(piece) for log in self._logs]
        for row in sorted((row for contents in read for row in contents.rows), key=lambda row: row.line):
            self._add_row(row)
        self._add_faults(sorted({one for contents in read for one in contents.faults}, key=lambda fault: fault.line))
        for contents in read:
            self._assumed.update(contents.assumed)
            for name, count in contents.others.items():
                self._others[name if name in self._others or len(self._others) < _MOST_NAMES else "others"] += count
        self._look_around(piece)
        self._lines += len(piece.splitlines()) - (not piece.endswith("\n"))  # the rest of a cut line follows

    def rows(self) -> Iterator[LoggedRow]:
        """Yield each call with the largest of the counts that it has by kinds of lines."""
        for first, counts in self.calls.values():
            yield replace(first, count=max(counts.values()))

    def remarks(self) -> Iterator[str]:
        """Yield remarks on the log, a line each: faults, other functions, and lines of other files."""
        path = self._path
        for fault in self._faults:
            yield f"{path}: line {fault.line}: {fault.reason}; its calls are not counted"
        if self._more_faults:
            yield f"{path}: {self._more_faults} other lines are not counted, the last of them line {self._last_fault}"
        if self._others:
            names = ", ".join(printable(name, 60) for name, _ in self._others.most_common(_MOST_REMARKS))
            yield f"{path}: {self._others.total()} calls of other functions are not counted, nor is their time: {names}"
        if not self.calls:
            return
        if twice := dict.fromkeys(kind for _, counts in self.calls.values() if len(counts) > 1 for kind in counts):
            yield (
                f"{path}: {' and '.join(twice)} have the same calls; the larger count of each is taken, which is too "
                "small if they are of different runs"
            )
        if self._assumed:
            defaults = ", ".join(f"{name} in {count}" for name, count in self._assumed.items())
            yield f"{path}: commands do not say all; the benchmark's defaults are taken: {defaults}"
        if self._sizes:
            yield (
                f"{path}: line {self._first_size} is of a file of sizes, as are {self._sizes - 1} others; they are not "
                "counted: name such a file by itself"
            )
        for name, line in self._architectures.items():
            if line:
                yield f"{path}: line {line} names {name}, and this campaign tunes for {self._target.name}"

    def _add_row(self, row: LoggedRow) -> None:
        known = self.calls.get(row.call)
        if known is None:
            if len(self.calls) == MOST_CALLS:
                raise InputError(
                    f"{self._path} holds more than {MOST_CALLS} different GEMMs; name a log of a shorter run"
                )
            known = self.calls[row.call] = replace(row, line=self._lines + row.line), {}
        known[1][row.kind] = known[1].get(row.kind, 0.0) + row.count

    def _add_faults(self, faults: list[LogFault]) -> None:
        if not faults:
            return
        room = max(_MOST_REMARKS - len(self._faults), 0)
        self._faults += [replace(fault, line=self._lines + fault.line) for fault in faults[:room]]
        self._more_faults += len(faults[room:])
        self._last_fault = self._lines + faults[-1].line

    def _look_around(self, piece: str) -> None:
        """Note sizes among the lines, and names of architectures, as programs print them between."""
        for match in _SIZE.finditer(piece):
            self._first_size = self._first_size or self._line_of(piece, match)
            self._sizes += 1
        for name, line in self._architectures.items():
            # Plain text is searched first, which takes a hundredth of the time over hundreds of megabytes.
            match_ = re.search(rf"\b{name}\b", piece) if not line and name in piece else None
            if match_ is not None:
                self._architectures[name] = self._line_of(piece, match_)

    def _line_of(self, piece: str, match: re.Match[str]) -> int:
        return self._lines + piece.count("\n", 0, match.start()) + 1

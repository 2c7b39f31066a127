"""Stage: a log, or a captured workload → products with how often each was called, and what can't be computed here."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritongemm.campaigns.column_major import as_call, as_problem, their_type
from tritongemm.campaigns.log_file import LogFile
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.values import POSITIVE
from tritongemm.formats import format_of
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog, Family
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


_ROW = re.compile(r"# left out: (?P<values>\{.*\})\s*")
_GRADIENT = "# Gradients were wanted"
_LARGEST = 2**31 - 1  # as of other sizes


@dataclass(frozen=True)
class LeftOut:
    """A product that was called and is no row of sizes."""

    line: int  # of the file, from 1
    reason: str  # why
    count: float = 0.0  # calls
    call: LoggedCall | None = None  # it in the library's terms; None where its sizes are not known

    def describe(self) -> str:
        """Return a line with the calls that are not counted, and why."""
        what = f"{self.count:g} calls of unknown sizes are not counted, nor is their time: " if self.count else ""
        return f"line {self.line}: {what}{self.reason}"


def read_left_out(text: str) -> Iterator[LeftOut]:
    """Yield the products in the remarks of a file that a capture wrote."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_GRADIENT):
            yield LeftOut(number, line.removeprefix("# "))
        elif match := _ROW.fullmatch(line):
            yield _read(number, match["values"])


def _read(line: int, text: str) -> LeftOut:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = {}
    if not POSITIVE.holds(values.get("count")):
        return LeftOut(line, "what the capture left out can't be read; its calls are not counted")
    words = [str(values[name]) for name in ("operation", "reason") if name in values]
    return LeftOut(line, printable(": ".join(words), 200), float(values["count"]), _read_call(values))


def _read_call(values: Mapping[str, Any]) -> LoggedCall | None:
    sizes = [values.get("N"), values.get("M"), values.get("K"), values.get("batch", 1)]
    if not all(isinstance(size, int) and 0 < size <= _LARGEST for size in sizes):
        return None
    m, n, k, batch = map(int, map(str, sizes))
    b, a, c = (their_type(str(values.get(f"dtype_{which}"))) for which in "bac")
    transposes = "".join("N" if values.get(f"rowMajor{which}") == "T" else "T" for which in "BA")
    return LoggedCall(m, n, k, transposes, (b, a, c, c), "f32_r", batch=batch, others=(str(values.get("operation")),))


@dataclass(frozen=True)
class LoggedProduct:
    """A product of a job."""

    call: LoggedCall  # it in the library's terms, for tables
    count: float  # calls
    line: int  # of the file, the first that has it
    problem: Problem | None  # the same product as a problem; None where it can't be computed here
    reason: str = ""  # why it can't be; "" where it can
    seconds: float = 0.0  # time of one call; 0 until it is weighed
    how: str = ""  # where that time is from, a constant of `weights`
    share: float = 0.0  # of the job's time, in percent

    @property
    def total_seconds(self) -> float:
        """Seconds that all calls take."""
        return self.seconds * self.count


@dataclass(frozen=True)
class JobWorkload:
    """The calls of a job."""

    products: tuple[LoggedProduct, ...]  # each once, those that can't be computed here too, in the order of the file
    remarks: tuple[str, ...] = ()  # what was noticed in the file, with its name and lines


def read_workload(log: LogFile, target: Target) -> JobWorkload:
    """Return the products of a log, or of a captured workload."""
    path = log.path
    logged = LoggedCalls(path, target)
    for piece in log.pieces():
        logged.add(piece)
    if not logged.is_log:
        return _read_sizes(path, log.text(), target)
    remarks = list(logged.remarks())
    if not logged.calls:
        raise InputError("; ".join([f"{path} holds no product that can be read", *remarks]))
    return JobWorkload(_joined(_computed(row, target) for row in logged.rows()), tuple(remarks))


def _read_sizes(path: Path, text: str, target: Target) -> JobWorkload:
    """Return the products of a file of sizes, with counts where it has them."""
    if not text.strip():
        raise InputError(f"{path} is empty; name a log of what a job called")
    try:
        format_ = format_of(path, text)
    except InputError as error:
        logs = "; ".join(log.title for log in registry.every(CallLog))
        raise InputError(f"{error}; and it holds no line of the logs that there are: {logs}") from None
    results = format_.read_usable(path, text, Defaults(fp8_encoding=target.fp8))
    if not results.rows:
        results.require_undamaged()
        raise InputError(f"{path} holds no sizes")
    products = []
    for row in results.rows:
        support = registry.get(Family, row.problem.family).supports(row.problem, target)
        problem = row.problem if support else None
        products.append(LoggedProduct(as_call(row.problem), row.count, row.line or 0, problem, support.reason))
    remarks = [row.reason for row in results.damaged]
    for one in read_left_out(text):
        if one.call is None:
            remarks.append(f"{path}: {one.describe()}")
        else:
            products.append(LoggedProduct(one.call, one.count, one.line, None, one.reason))
    return JobWorkload(_joined(products), tuple(remarks))


def _computed(row: LoggedRow, target: Target) -> LoggedProduct:
    """Return a row's product, as a problem on a target."""
    problem = as_problem(row.call, target.fp8)
    if isinstance(problem, Support):
        return LoggedProduct(row.call, row.count, row.line, None, problem.reason)
    support = registry.get(Family, problem.family).supports(problem, target)
    if not support:
        return LoggedProduct(row.call, row.count, row.line, None, support.reason)
    return LoggedProduct(row.call, row.count, row.line, problem)


def _joined(products: Iterable[LoggedProduct]) -> tuple[LoggedProduct, ...]:
    """Return each product once, merging calls that are one problem here, e.g. that add nothing of different Cs."""
    found: dict[Problem | LoggedCall, LoggedProduct] = {}
    for one in products:
        key = one.problem or one.call
        known = found.get(key)
        found[key] = one if known is None else replace(known, count=known.count + one.count)
    return tuple(found.values())

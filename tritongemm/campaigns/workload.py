"""Stage: a log, or a captured workload → products with how often each was called, and what can't be computed here."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tritongemm.campaigns.column_major import as_call, as_problem, their_type
from tritongemm.campaigns.log_file import LogFile
from tritongemm.campaigns.logged_calls import LoggedCalls
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.values import POSITIVE
from tritongemm.formats import format_of
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog, Family
from tritongemm.plugins.contracts.call_logs import LoggedCall, LoggedRow
from tritongemm.system.printable import printable

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

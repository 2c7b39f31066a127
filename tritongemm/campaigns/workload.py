"""Stage: a log, or a captured workload → products with how often each was called, and what can't be computed here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.campaigns.column_major import as_call, as_problem
from tritongemm.campaigns.left_out import read_left_out
from tritongemm.campaigns.log_file import LogFile
from tritongemm.campaigns.logged_calls import LoggedCalls
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats import format_of
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog, Family
from tritongemm.plugins.contracts.call_logs import LoggedCall, LoggedRow


@dataclass(frozen=True)
class LoggedProduct:
    """A product of a job.

    Attributes:
        call: it in the library's terms, for tables.
        count: calls.
        line: of the file, the first that has it.
        problem: the same product as a problem; None where it can't be computed here.
        reason: why it can't be; "" where it can.
        seconds: time of one call; 0 until it is weighed.
        how: where that time is from, a constant of `weights`.
        share: of the job's time, in percent.
    """

    call: LoggedCall
    count: float
    line: int
    problem: Problem | None
    reason: str = ""
    seconds: float = 0.0
    how: str = ""
    share: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds that all calls take."""
        return self.seconds * self.count


@dataclass(frozen=True)
class JobWorkload:
    """The calls of a job.

    Attributes:
        products: each once, those that can't be computed here too, in the order of the file.
        remarks: what was noticed in the file, with its name and lines.
    """

    products: tuple[LoggedProduct, ...]
    remarks: tuple[str, ...] = ()


def read_workload(log: LogFile, target: Target) -> JobWorkload:
    """Return the products of a log, or of a captured workload.

    Args:
        log: of any size; it is read in pieces, and what is kept of it are its different calls.
        target: for which it is asked what can be computed.

    Raises:
        InputError: the file holds no product, or is in no form that is known.
    """
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

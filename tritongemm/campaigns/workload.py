"""Stage: a log, or a captured workload → products with how often each was called, and what can't be computed here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.campaigns.column_major import as_call, as_problem
from tritongemm.campaigns.left_out import read_left_out
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.logged_call import LogContents, LoggedCall, LoggedRow
from tritongemm.core.printable import printable
from tritongemm.core.problem import Problem
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.formats import format_of, plain_text
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import CallLog, Family
from tritongemm.search_spaces import loader as target_files

_SIZE = re.compile(r"^- ?\{ ?['\"]?M['\"]?:", re.MULTILINE)  # how a row of a file of sizes begins
_MOST_TOLD = 5  # Lines of one kind of fault that are told one by one.


@dataclass(frozen=True)
class LoggedProduct:
    """A product of a job.

    Attributes:
        call: it in the library's terms, for tables.
        count: calls.
        line: of the file, the first that tells it.
        problem: it in ours; None where it can't be computed here.
        reason: why it can't be; "" where it can.
    """

    call: LoggedCall
    count: float
    line: int
    problem: Problem | None
    reason: str = ""


@dataclass(frozen=True)
class JobWorkload:
    """What a job called.

    Attributes:
        products: each once, those that can't be computed here too, in the order of the file.
        remarks: what was noticed in the file, with its name and lines.
    """

    products: tuple[LoggedProduct, ...]
    remarks: tuple[str, ...] = ()


def read_workload(path: Path, contents: bytes, target: Target) -> JobWorkload:
    """What a log or a captured workload tells.

    Args:
        path: of the file, for messages.
        contents: of it; bytes that are no text, as other programs may write them between, are passed over.
        target: for which it is asked what can be computed.

    Raises:
        InputError: the file holds no product, or is in no form that is known.
    """
    text = plain_text(contents.decode("utf-8", "replace"))
    read = {log.title: log.read(text) for log in registry.every(CallLog)}
    found = {title: contents for title, contents in read.items() if contents.rows or contents.faults or contents.others}
    if not found:
        return _read_sizes(path, text, target)
    remarks = [*_tell_faults(path, found.values()), *_tell_others(path, found.values())]
    rows = [row for contents in found.values() for row in contents.rows]
    if not rows:
        raise InputError("; ".join([f"{path} holds no product that can be read", *remarks]))
    counts, told_twice = _count(rows)
    if told_twice:
        remarks.append(
            f"{path}: {' and '.join(told_twice)} tell the same calls; the larger count of each is taken, which is too "
            "small if they are of different runs"
        )
    remarks += [*_tell_sizes(path, text), *_tell_architectures(path, text, target)]
    return JobWorkload(_joined(_computed(replace(row, count=count), target) for row, count in counts), tuple(remarks))


def _read_sizes(path: Path, text: str, target: Target) -> JobWorkload:
    """What a file of sizes tells, with counts where it has them."""
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
            remarks.append(f"{path}: {one.tell()}")
        else:
            products.append(LoggedProduct(one.call, one.count, one.line, None, one.reason))
    return JobWorkload(_joined(products), tuple(remarks))


def _count(rows: Sequence[LoggedRow]) -> tuple[list[tuple[LoggedRow, float]], list[str]]:
    """The first row of each call with its count, and the kinds of lines that tell the same calls.

    Lines of one kind add up, whichever process or run wrote them. Of lines of two kinds the library wrote one each for
    one call, as it does where it is asked for two kinds of log.
    """
    first: dict[LoggedCall, LoggedRow] = {}
    sums: dict[LoggedCall, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row.line):
        first.setdefault(row.call, row)
        of_kind = sums.setdefault(row.call, {})
        of_kind[row.kind] = of_kind.get(row.kind, 0.0) + row.count
    twice = dict.fromkeys(kind for kinds in sums.values() if len(kinds) > 1 for kind in kinds)
    return [(first[call], max(kinds.values())) for call, kinds in sums.items()], list(twice)


def _computed(row: LoggedRow, target: Target) -> LoggedProduct:
    """A row's product, with what it is to us on a target."""
    problem = as_problem(row.call)
    if isinstance(problem, Support):
        return LoggedProduct(row.call, row.count, row.line, None, problem.reason)
    support = registry.get(Family, problem.family).supports(problem, target)
    if not support:
        return LoggedProduct(row.call, row.count, row.line, None, support.reason)
    return LoggedProduct(row.call, row.count, row.line, problem)


def _joined(products: Iterable[LoggedProduct]) -> tuple[LoggedProduct, ...]:
    """Each product once: calls that are one problem to us are, as two that add nothing of different Cs."""
    found: dict[Problem | LoggedCall, LoggedProduct] = {}
    for one in products:
        key = one.problem or one.call
        known = found.get(key)
        found[key] = one if known is None else replace(known, count=known.count + one.count)
    return tuple(found.values())


def _tell_faults(path: Path, every: Iterable[LogContents]) -> Iterator[str]:
    faults = sorted({fault for contents in every for fault in contents.faults}, key=lambda fault: fault.line)
    for fault in faults[:_MOST_TOLD]:
        yield f"{path}: line {fault.line}: {fault.reason}; its calls are not counted"
    if len(faults) > _MOST_TOLD:
        yield f"{path}: {len(faults) - _MOST_TOLD} other lines are not counted, the last of them line {faults[-1].line}"


def _tell_others(path: Path, every: Iterable[LogContents]) -> Iterator[str]:
    others = sum((contents.others for contents in every), Counter[str]())
    if others:
        names = ", ".join(printable(name, 60) for name, _ in others.most_common(_MOST_TOLD))
        yield f"{path}: {others.total()} calls of other functions are not counted, nor is their time: {names}"


def _tell_sizes(path: Path, text: str) -> Iterator[str]:
    """Where sizes stand among the lines of logs."""
    found = list(_SIZE.finditer(text))
    if found:
        number = text.count("\n", 0, found[0].start()) + 1
        yield (
            f"{path}: line {number} is of a file of sizes, as are {len(found) - 1} others; they are not counted: name "
            "such a file by itself"
        )


def _tell_architectures(path: Path, text: str, target: Target) -> Iterator[str]:
    """Which other architectures a log names, as programs print them between its lines."""
    for name in target_files.target_names():
        # A search for plain text first: it takes a hundredth of the time over what may be hundreds of megabytes.
        match = re.search(rf"\b{name}\b", text) if name in text and name != target.name else None
        if match is not None:
            number = text.count("\n", 0, match.start()) + 1
            yield f"{path}: line {number} names {name}, and this campaign tunes for {target.name}"

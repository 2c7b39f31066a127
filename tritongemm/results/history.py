"""Reads how the runs of a journal went: candidates in the order in which they were tried, and when.

Nothing is written and nothing is held: the run whose journal it is may go on.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.core.values import FINITE, require
from tritongemm.results import journal
from tritongemm.results.schema import Line
from tritongemm.system import reading


@dataclass(frozen=True)
class Tried:
    """A candidate that was tried."""

    problem: Problem  # of what size
    trial: Trial  # its outcome
    seconds: float  # since the first run of the journal began, without the time between runs


@dataclass(frozen=True)
class History:
    """The course of the runs of one journal."""

    header: Mapping[str, Any]  # what the first line says of target, toolchain and protocol
    tried: tuple[Tried, ...]  # candidates in the order of the lines
    records: tuple[Record, ...]  # the last result of each problem
    seconds: float  # what the runs took up to the last trial
    unread: int  # how many lines can't be read


def read(path: Path, problems: Collection[Problem] | None = None) -> History:
    """Return the course of the runs of a journal; the line that is being written now is passed over.

    With `problems` it is of these only, and the seconds are of runs that tried any of them.
    """
    data = reading.read_bytes(path)
    if not data or not journal.is_journal(data):
        raise InputError(f"{path} is not a journal of tritongemm")
    found = journal.parse(path, data)
    unread = len(found.damaged)
    header: Mapping[str, Any] = {}
    records: dict[Problem, Record] = {}
    tried = []
    clock = _Clock()
    asked = None if problems is None else frozenset(problems)
    for line in found.lines.values():
        if line.kind == "header":
            header = line.value
        elif line.kind == "record" and (asked is None or line.value.problem in asked):
            records[line.value.problem] = line.value
        elif line.kind == "trial" and (asked is None or line.value[0] in asked):
            try:
                tried.append(_tried(line, clock))
            except (InputError, KeyError, TypeError, ValueError):
                unread += 1
    return History(header, tuple(tried), tuple(records.values()), clock.seconds, unread)


class _Clock:
    """Seconds of several runs in one journal, each of which counts from its own beginning."""

    def __init__(self) -> None:
        self._earlier, self._last = 0.0, 0.0
        self.seconds = 0.0

    def count(self, elapsed: float) -> float:
        """Return the seconds since the first run began, from those of the run that wrote a line."""
        if elapsed < self._last:
            self._earlier += self._last
        self._last = elapsed
        self.seconds = self._earlier + elapsed
        return self.seconds


def _tried(line: Line, clock: _Clock) -> Tried:
    """Return the candidate of a line."""
    problem, trial = line.value
    elapsed = json.loads(trial.line)["elapsed"]
    require({"elapsed": elapsed}, {"elapsed": FINITE})
    return Tried(problem, trial.read(), clock.count(float(elapsed)))

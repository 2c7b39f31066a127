"""A table over M of one product: measurements at some M, the range of M that each result serves, and its regret."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from tritongemm.core.config import Config
from tritongemm.core.record import Record

MOST_REGRET = 0.03  # A range whose result is further from the best than this share at one of its M is split.


@dataclass(frozen=True)
class MeasuredM:
    """The result of a race at one M.

    Attributes:
        record: the result.
        seconds: median seconds of each candidate that raced.
    """

    record: Record
    seconds: Mapping[Config, float]

    @property
    def m(self) -> int:
        """The M at which the candidates raced."""
        return self.record.problem.m

    @property
    def best(self) -> float:
        """Seconds of the fastest candidate, including the library."""
        library = self.record.library_seconds
        return min([*self.seconds.values(), *([] if library is None else [library])])

    def seconds_of(self, record: Record) -> float | None:
        """Return the seconds that another M's result takes at this M; None if it did not race, infinite if wrong."""
        if library_serves(record):
            return inf if self.record.library_wrong else self.record.library_seconds
        return self.seconds.get(record.config)

    def regret(self, record: Record) -> float | None:
        """Return how much slower another M's result is here than the best, relative; None if it did not race."""
        seconds = self.seconds_of(record)
        return None if seconds is None else seconds / self.best - 1

    def share(self, record: Record) -> float | None:
        """Return the library's time over that of another M's result at this M; None if one of them did not race."""
        seconds, library = self.seconds_of(record), self.record.library_seconds
        return library / seconds if seconds and library else None


@dataclass
class MTable:
    """The rows of a table over M, each of which serves the M above the previous row's up to its own.

    Attributes:
        low: the smallest M that is served.
        rows: results by their M.
        held_out: races at held-out M, which had no part in choosing the rows, by M.
    """

    low: int
    rows: dict[int, MeasuredM] = field(default_factory=dict)
    held_out: dict[int, MeasuredM] = field(default_factory=dict)

    def row_of(self, m: int) -> MeasuredM | None:
        """Return the row that serves an M; None above the last."""
        known = sorted(self.rows)
        at = bisect_left(known, m)
        return self.rows[known[at]] if at < len(known) else None

    def records(self) -> list[Record]:
        """Return the rows' records, each with the smallest M it serves and the results at held-out M of its range."""
        found, start = [], self.low
        for m in sorted(self.rows):
            record = self.rows[m].record
            seen = {str(o): _seen(self.held_out[o], record) for o in sorted(self.held_out) if start <= o < m}
            held_out = {o: numbers for o, numbers in seen.items() if numbers is not None}
            found.append(replace(record, m_from=min(start, m), held_out=held_out))
            start = m + 1
        return found


def library_serves(record: Record) -> bool:
    """Say whether the library that raced as the baseline serves a result's calls."""
    return bool(record.library) and record.winner == record.library


def _seen(there: MeasuredM, record: Record) -> list[float] | None:
    regret, share = there.regret(record), there.share(record)
    return None if regret is None else [round(regret, 4), round(share or 0.0, 4)]

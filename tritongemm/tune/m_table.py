"""A table over M of one product: measurements at some M, the range of M that each result serves, and its regret."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean

from tritongemm.core.config import Config
from tritongemm.core.record import Record

MOST_REGRET = 0.03  # A range whose result is further from the best than this share at one of its M is split.
_STEP = 64
_NOISE = 0.01  # the library is called faster at a held-out M where it takes less time by more than this share
_LOSS = 0.015  # the same at an M that had a part in choosing the row


@dataclass(frozen=True)
class MeasuredM:
    """The result of a race at one M."""

    record: Record
    seconds: Mapping[Config, float]

    @property
    def m(self) -> int:
        """The M at which the candidates raced."""
        return self.record.problem.m

    @property
    def best(self) -> float:
        """Seconds of the fastest candidate, including the library unless rows are invariant."""
        library = None if self.record.order else self.record.library_seconds  # which adds up in an order of its own
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
    """The rows of a table over M, each of which serves the M above the previous row's up to its own."""

    low: int  # the smallest M that is served
    rows: dict[int, MeasuredM] = field(default_factory=dict)  # results by their M
    # Races at held-out M, which had no part in choosing the rows, by M.
    held_out: dict[int, MeasuredM] = field(default_factory=dict)
    starts: dict[int, MeasuredM] = field(default_factory=dict)  # races at the least M that rows served, by M

    def row_of(self, m: int) -> MeasuredM | None:
        """Return the row that serves an M; None above the last."""
        known = sorted(self.rows)
        at = bisect_left(known, m)
        return self.rows[known[at]] if at < len(known) else None

    def records(self) -> list[Record]:
        """Return the rows' records, each with the smallest M it serves and the results at held-out M of its range.

        The library serves a range whose row is not expected to be faster between the M that were measured. The row then
        serves its own M, where it won, and which calls have more often: sizes of batches, powers of two.
        """
        lost = self._gains_lost()
        found, start = [], self.low
        for m in sorted(self.rows):
            record, inside = self.rows[m].record, [o for o in sorted(self.held_out) if start <= o < m]
            if start < m and self._library_is_safer(m, inside, lost):
                below = replace(record, winner=record.library)
                if record.tie or m - 1 in self.held_out.keys() | self.starts.keys():
                    record = below
                else:
                    found.append(self._serving(replace(below, problem=record.problem.at(m - 1)), start, inside))
                    start, inside = m, []
            found.append(self._serving(record, min(start, m), inside))
            start = m + 1
        return found

    def _serving(self, record: Record, start: int, inside: Sequence[int]) -> Record:
        """Return a record that serves M from a start on, with the results at the held-out M inside."""
        seen = {str(m): _seen(self.held_out[m], record) for m in inside}
        held_out = {m: numbers for m, numbers in seen.items() if numbers is not None}
        return replace(record, m_from=start, held_out=held_out)

    def _shares(self, m: int) -> list[float]:
        """Return the library's time over that of a row's result at its M and the least of its range; [] if unknown."""
        record = self.rows[m].record
        if _gain(record) is None:
            return []
        below = max((one for one in self.rows if one < m), default=0)
        known = [self.rows[m], *(there for one, there in self.starts.items() if below < one < m)]
        return [share for there in known if (share := there.share(record))]

    def _library_is_safer(self, m: int, inside: Iterable[int], lost: Mapping[str, float]) -> bool:
        """Say whether the library is faster at a held-out or the least M of a row's range, or the row's gain is lost.

        Nothing is known of the bits of what it would compute between the rows of an invariant table.
        """
        record, gains = self.rows[m].record, self._shares(m)
        if not gains or record.order or library_serves(record):
            return False
        if any(o.record.library_wrong for o in self.held_out.values()):
            return False
        shares = [share for o in inside if (share := self.held_out[o].share(record)) is not None]
        left = fmean(gains) * (1 - lost.get(record.config.backend, 0.0))
        return min(shares, default=1.0) < 1 - _NOISE or min(gains) < 1 - _LOSS or left < 1

    def _gains_lost(self) -> dict[str, float]:
        """Return by backend which share of a row's gain over the library was lost at held-out M, on average."""
        seen: dict[str, list[float]] = {}
        for m, there in self.held_out.items():
            row = self.row_of(m)
            gains, share = (self._shares(row.m), there.share(row.record)) if row else ([], None)
            if row and gains and share and not library_serves(row.record):
                seen.setdefault(row.record.config.backend, []).append(max(0.0, 1 - share / min(gains)))
        return {backend: fmean(shares) for backend, shares in seen.items()}


def split_at_steps(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the rows of a table, where the library serves the lower part of a range that has a step of its time inside.

    Tiles of most heights fit a multiple of 64 exactly, so that times jump behind it. A row is raced at its largest M,
    behind the step; where its kernel takes longer there than the library did at the row below, the library is expected
    to be faster up to the step. That part has the times of the row below.
    """
    below: Record | None = None
    for record in sorted(records, key=lambda one: one.problem.m):
        step = (record.problem.m - 1) // _STEP * _STEP
        is_ours = _gain(record) is not None and not record.order and not library_serves(record)
        was_faster = below is not None and (below.library_seconds or inf) < record.seconds
        if below and below.library and is_ours and was_faster and below.problem.m < record.m_from <= step:
            lower = below.problem.at(step)
            yield replace(below, problem=lower, winner=below.library, m_from=record.m_from, held_out={})
            seen = {m: numbers for m, numbers in record.held_out.items() if int(m) > step}
            record = replace(record, m_from=step + 1, held_out=seen)
        yield record
        below = record


def library_serves(record: Record) -> bool:
    """Say whether the library that raced as the baseline serves a result's calls."""
    return bool(record.library) and record.winner == record.library


def _gain(record: Record) -> float | None:
    """Return the library's time over that of a result's kernel; None if it was not measured, or is wrong."""
    return record.library_seconds / record.seconds if record.library_seconds and not record.library_wrong else None


def _seen(there: MeasuredM, record: Record) -> list[float] | None:
    regret, share = there.regret(record), there.share(record)
    return None if regret is None else [round(regret, 4), round(share or 0.0, 4)]

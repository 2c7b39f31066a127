"""Times rows of a file of tuned configs again, and the rows of a new run beside them.

AITER's tuners call that ``--run_config`` and ``--compare``. What a row names is timed in races with the baseline; a
kernel that is AITER's own can't be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.formats import results_format
from tritongemm.numerics.computable_families import defaults_on
from tritongemm.plugins import registry
from tritongemm.report.console import Reporter
from tritongemm.report.tables import print_retimed
from tritongemm.results import tuned_file
from tritongemm.results.revalidation import RetimedResult
from tritongemm.results.store import Store
from tritongemm.tune import session
from tritongemm.tune.cluster import open_machine
from tritongemm.tune.request import TuneRequest
from tritongemm.tune.revalidate import Revalidation
from tritongemm.workloads import sizes

_OWN_KERNEL = "its row names a kernel that only AITER has"
_COLUMNS = ("size", "before us", "now us", "improvement", "what")


@dataclass(frozen=True)
class _Timing:
    """The tools with which rows are timed."""

    again: Revalidation
    target: Target
    defaults: Defaults
    reporter: Reporter

    @classmethod
    @contextmanager
    def open(cls, request: TuneRequest, reporter: Reporter) -> Iterator[_Timing]:
        """Open the timing of a run of the request."""
        with (
            open_machine(request, reporter.say) as (machine, cluster),
            session.open_session(request, machine, session.make_protocol(request, machine), cluster) as tools,
        ):
            again = Revalidation(tools.evaluators[0], tools.pool, reporter)
            yield cls(again, machine.target, defaults_on(machine.target, request.sizes.defaults), reporter)

    def rows(self, path: Path) -> dict[Problem, FormatRow]:
        """Return the rows of a file that are for this device, or for any."""
        if not path.exists():
            return {}
        places = ("", 0), (self.target.name, 0), (self.target.name, self.target.compute_units)
        found = sizes.from_results(path, self.defaults)
        return {row.problem: row for row in found.rows if (row.target, row.compute_units) in places}

    def retime(self, rows: Sequence[FormatRow]) -> list[RetimedResult]:
        """Return the times of rows that have a config."""
        return self.again.retime(rows, registry.baseline().name)


def run_config(request: TuneRequest, reporter: Reporter, path: Path, tuned: bool) -> bool:
    """Time the rows of a file, or its sizes by the baseline's own choice; return whether all could be timed."""
    with _Timing.open(request, reporter) as timing:
        rows = list(timing.rows(path).values())
        own = [row if tuned else replace(row, config=_default()) for row in rows]
        wanted = [row for row in own if row.config is not None]
        if not wanted:
            why = (
                f"of its {len(rows)} rows for it each names a kernel that only AITER has"
                if rows
                else "no row is for it"
            )
            here = f"{timing.target.name} with {timing.target.compute_units} compute units"
            raise InputError(f"{path}: nothing can be timed on {here}: {why}")
        if len(wanted) < len(rows):
            timing.reporter.say(
                f"not timed: {len(rows) - len(wanted)} of {len(rows)} rows, each of a kernel that only AITER has"
            )
        results = timing.retime(wanted)
        print_retimed(timing.reporter, results)
        return all(result.trial.status == "ok" for result in results)


def _default() -> Config | None:
    """Return the baseline's own choice as a config."""
    baseline = registry.baseline()
    choice = baseline.named_kernel(None)
    return None if choice is None else baseline.config_of(choice)


@dataclass(frozen=True)
class _Comparison:
    """A size with a file's row and a new one."""

    problem: Problem  # the size
    # Seconds by the row that is there, or by the baseline where there is none; None where neither runs.
    before: float | None
    now: float | None  # seconds by the new row; None where it does not run
    obstacle: str = ""  # why the two can't be compared; "" where they can

    @property
    def percent(self) -> float | None:
        """The improvement: how much shorter the time is now, in percent of the time before."""
        return None if self.before is None or self.now is None else 100 * (self.before - self.now) / self.before

    def improves(self, least: float) -> bool:
        """Return whether the new row is better by at least `least` percent, or the only one that runs."""
        if self.obstacle or self.now is None:
            return False
        return self.percent is None or self.percent >= least

    def cells(self, least: float) -> list[str]:
        """Return its row of a table."""
        microseconds = ["-" if seconds is None else f"{seconds * 1e6:.2f}" for seconds in (self.before, self.now)]
        what = self.obstacle or ("new" if self.before is None else "better")
        if not self.obstacle and not self.improves(least):
            what = f"less than {least:g} %"
        return [self.problem.key, *microseconds, "-" if self.percent is None else f"{self.percent:.2f} %", what]


def compare(
    request: TuneRequest, reporter: Reporter, output: Path, candidate: Path, least_percent: float, update: bool
) -> None:
    """Time the new rows of a file beside another file's, and take over those that are better."""
    with _Timing.open(request, reporter) as timing:
        old = timing.rows(output)
        changed = {
            problem: row
            for problem, row in timing.rows(candidate).items()
            if row.record is not None and (problem not in old or row.record != old[problem].record)
        }
        found = list(_compared(timing, old, changed))
        if found:
            timing.reporter.table("", _COLUMNS, [one.cells(least_percent) for one in found])
        records = [changed[one.problem].record for one in found if one.improves(least_percent)]
        timing.reporter.say(
            f"{len(records)} of {len(found)} new rows are {least_percent:g} % faster or more, or the only ones that run"
        )
        if update:
            _update(output, candidate, [record for record in records if record is not None], timing, request.outputs.to)
            timing.reporter.say(f"{output}: {len(records)} rows are taken over from {candidate}")
        else:
            timing.reporter.say(
                f"{output} is as it was; {candidate} has the new rows, which --update_improved takes over"
            )


def _compared(
    timing: _Timing, old: Mapping[Problem, FormatRow], changed: Mapping[Problem, FormatRow]
) -> Iterator[_Comparison]:
    """Yield the comparison of each new row; its race follows that of the old one."""
    rows = [one for p, row in changed.items() for one in (old.get(p), row) if one is not None and one.config]
    results = {id(row): result for row, result in zip(rows, timing.retime(rows), strict=True)}
    for problem, row in changed.items():
        new, there = results[id(row)], results.get(id(old.get(problem)))
        now = new.trial.seconds if new.trial.status == "ok" else None
        if there is not None:
            before = there.trial.seconds if there.trial.status == "ok" else None
        else:
            before = None if problem in old else new.baseline_seconds
        unknown = problem in old and there is None
        obstacle = _OWN_KERNEL if unknown else f"fails: {new.trial.reason}" if now is None else ""
        yield _Comparison(problem, before, now, obstacle)


def _update(output: Path, candidate: Path, records: Sequence[Record], timing: _Timing, to: str) -> None:
    """Put records into a file of tuned configs, and our own results of them into the file beside it."""
    with tuned_file.held(output):
        tuned_file.write(output, tuned_file.output_format(output, to), records, family=timing.defaults.family)
    suffix = results_format().suffixes[0]
    ours = timing.rows(candidate.with_suffix(suffix))
    mine = [row.record for record in records if (row := ours.get(record.problem)) and row.record]
    for one in mine[:1]:
        place = output.with_suffix(suffix)
        with Store.open(place, one.target, one.toolchain, {}, problems=(), compute_units=one.compute_units) as store:
            for record in mine:
                store.add_record(record)
            store.merge()

"""Prints tables: sizes to be tuned, tables over M and how well they do at M held out, stored results that ran again."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import exp, log

import numpy as np

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import PREDICTED
from tritongemm.report.console import Reporter
from tritongemm.results.revalidation import LEAST_KEPT_SHARE_OF_GAIN, RetimedResult, VerifiedResult


def print_table(reporter: Reporter, records: Sequence[Record]) -> None:
    """Print the ranges of one product's table, neighbours that the same kernel serves as one."""
    rows = []
    for _, group in groupby(records, key=lambda r: (r.winner, r.config)):
        of_range = list(group)
        first, last = of_range[0], of_range[-1]
        ratios = [r.speedup for r in of_range if r.speedup is not None]
        gain = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
        us = f"{first.seconds * 1e6:.2f} to {last.seconds * 1e6:.2f}"
        rows.append([f"{first.m_from} to {last.problem.m}", us, gain, last.winner, last.config.short_name])
    reporter.table(f"M of {records[0].problem.product}", ["M", "us", "ratio", "winner", "config"], rows)


def print_held_out(reporter: Reporter, records: Iterable[Record]) -> None:
    """Print how well rows do at M that had no part in choosing them; nothing where none was held out."""
    tested = [record for record in records if record.held_out]
    seen = [(float(regret), float(share)) for record in tested for regret, share in record.held_out.values()]
    if not seen:
        return
    how = "predicted" if all(record.predicted for record in tested) else "measured"
    regrets, shares = (np.array(column) for column in zip(*seen, strict=True))
    text = f"held-out M: {len(seen)} {how}; slower than the best known there by {regrets.mean():.1%} on average"
    text += f", {np.percentile(regrets, 90):.1%} at the 90th percentile, {regrets.max():.1%} at worst"
    raced = shares[shares > 0]
    if raced.size:
        mean = float(np.exp(np.log(raced).mean()))
        text += f"; {mean:.3f} of the library's speed (geometric mean), {raced.min():.3f} at least"
    reporter.say(text)


def print_gain(
    reporter: Reporter, rows: Iterable[FormatRow], records: Iterable[Record], joining_saves: float = 0.0
) -> None:
    """Print what the calls of a workload take by the library and by what serves them, weighted by their number.

    Only sizes whose library raced count. `joining_saves` is seconds that joined layers save.
    """
    known = {record.problem: record for record in records if record.library_seconds is not None}
    theirs, ours = 0.0, -joining_saves
    for row in rows:
        record = known.get(row.problem)
        if record is None:
            continue
        theirs += row.count * (record.library_seconds or 0.0)
        ours += row.count * record.served_seconds
    if theirs:
        reporter.say(
            f"the workload's products: {theirs * 1e3:.3f} ms by the library, {ours * 1e3:.3f} ms by what serves them, "
            f"{theirs / ours:.3f} times as fast"
        )


_COLUMNS = ("size", "M", "N", "K", "count", "callers")


def print_sizes(reporter: Reporter, rows: Sequence[FormatRow]) -> None:
    """Print each size with its weight and callers, and how many there are."""
    cells = []
    for row in rows:
        p = row.problem
        cells.append([p.key, str(p.m), str(p.n), str(p.k), f"{row.count:g}", ", ".join(row.callers)])
    reporter.table("", list(_COLUMNS), cells)
    reporter.say(f"{len(rows)} size{'s' if len(rows) != 1 else ''}")


def print_verified(reporter: Reporter, results: Sequence[VerifiedResult], verification: str) -> None:
    """Print the error of each result, how many are correct, and what that means."""
    rows = []
    for result in results:
        trial = result.trial
        error, limit = ("-" if v is None else f"{v:.2e}" for v in (trial.error, trial.tolerance))
        rows.append(
            [result.problem.key, trial.status, error, limit, result.how or "-", trial.config.short_name, trial.reason]
        )
    reporter.table("", ["size", "status", "error", "allowed", "checked", "config", "why"], rows)
    wrong, refused = sum(r.wrong for r in results), sum(r.refused for r in results)
    unchecked = sum(r.unchecked for r in results)
    counts = (wrong, "are not"), (refused, "are refused"), (unchecked, "can't be checked here")
    others = [f", {n} {what}" for n, what in counts if n]
    reporter.say(f"{len(results) - wrong - refused - unchecked} of {len(results)} results are right{''.join(others)}")
    if any(result.how for result in results):
        reporter.say(f"checked {verification}")


def print_retimed(reporter: Reporter, results: Sequence[RetimedResult]) -> None:
    """Print the times of each result beside those stored, and how many of the recorded gains hold."""
    columns = ["size", "us", "stored us", "TFLOPS", "library us", "ratio", "stored ratio", "timer", "config", "why"]
    predicted = any(r.trial.timer == PREDICTED for r in results)
    title = f"Predicted, not measured (timer: {PREDICTED})" if predicted else ""
    reporter.table(title, columns, [_retimed_row(r) for r in results])
    found = [r.gain_holds for r in results if r.gain_holds is not None]
    if found:
        within, share = 1 - LEAST_KEPT_SHARE_OF_GAIN, sum(found) / len(found)
        reporter.say(f"{sum(found)} of {len(found)} recorded gains hold within {within:.0%} ({share:.0%})")
    reporter.wrong_libraries([f"{r.problem.key} ({r.library_wrong})" if r.library_wrong else "" for r in results])


def _retimed_row(result: RetimedResult) -> list[str]:
    trial, record = result.trial, result.record
    timed = trial.status == "ok"
    return [
        result.problem.key,
        _microseconds(trial.seconds) if timed else "-",
        _microseconds(record.seconds) if record else "-",
        f"{result.problem.flops / trial.seconds / 1e12:.1f}" if timed else "-",
        _microseconds(result.baseline_seconds) if timed and result.baseline_seconds else "-",
        _ratio(result.ratio),
        _ratio(record.speedup if record else None),
        trial.timer if timed else "not timed" if trial.status == "pruned" else trial.status,
        trial.config.short_name,
        trial.reason,
    ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _ratio(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"


def print_invariance(
    reporter: Reporter, records: Sequence[Record], unconstrained: Iterable[Record], counts: Mapping[Problem, float]
) -> None:
    """Print the library's time over each result's, and over the unconstrained one's, and means weighted by calls.

    The two results raced at different times; each is compared with the library's time in its own race, so that a
    device's clock does not count.
    """
    if not records:
        return
    others = {r.problem: r for r in unconstrained if not r.order}
    rows, of_library, of_best, calls = [], [], [], list[tuple[float, float, float]]()
    for record in records:
        speed, best = record.speedup, others.get(record.problem)
        free = best.library_seconds / best.served_seconds if best and best.library_seconds else None
        share = speed / free if speed and free else None
        rows.append([record.problem.key, record.order, f"{record.seconds * 1e6:.2f}", _ratio(speed), _ratio(share)])
        of_library += [speed] if speed else []
        of_best += [share] if share else []
        if record.library_seconds:
            calls.append((counts.get(record.problem, 1.0), record.library_seconds, record.seconds))
    columns = ["size", "order", "us", "of library", "of unconstrained"]
    if not any(of_best):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    if of_library:
        reporter.table("Price of invariant rows", columns, rows)
    orders = ", ".join(f"{order} ({count})" for order, count in Counter(r.order for r in records).most_common())
    reporter.say(f"rows have the same bits at every M; order of additions: {orders}")
    for name, found in (("the library's", of_library), ("the unconstrained winners'", of_best)):
        if found:
            mean = exp(sum(map(log, found)) / len(found))
            reporter.say(f"{mean:.3f} of {name} speed (geometric mean of {len(found)}), {min(found):.3f} at least")
    if calls:
        theirs, ours = (sum(call[0] * call[i] for call in calls) for i in (1, 2))
        times = f"{theirs * 1e3:.3f} ms by the library, {ours * 1e3:.3f} ms by invariant rows"
        reporter.say(f"all calls: {times}, {theirs / ours:.3f} times as fast")

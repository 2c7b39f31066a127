"""Prints what it costs that rows have the same bits at every M."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.report.console import Reporter


def print_price(
    reporter: Reporter, records: Sequence[Record], unconstrained: Iterable[Record], counts: Mapping[Problem, float]
) -> None:
    """Print the library's time over each result's, and over the unconstrained one's, and means weighted by calls.

    The two results raced at different times; each is compared with the library's time in its own race, so that a
    device's clock does not count.
    """
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


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""Prints tables over M: which kernel serves which M, and how well the rows do at M held out."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from tritongemm.core.format_row import FormatRow
from tritongemm.core.record import Record
from tritongemm.report.console import Reporter


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
    title = f"M of {records[0].problem.product}"
    reporter.table(title, ["M", "us", "ratio", "winner", "config"], rows)


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

    Args:
        reporter: where to print.
        rows: the workload's sizes and counts.
        records: what was measured; sizes without a record, or whose library did not race, are left out.
        joining_saves: seconds that the calls take less where layers that read one input are one product.
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

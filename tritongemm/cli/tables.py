"""Prints tables over M for `tritongemm tune`."""

from collections.abc import Mapping, Sequence

from tritongemm.core.format_row import FormatRow
from tritongemm.core.record import Record
from tritongemm.report import invariance
from tritongemm.report.console import Reporter
from tritongemm.report.m_tables import print_gain, print_held_out, print_table
from tritongemm.tune.m_table import MTable
from tritongemm.tune.request import SizeSource
from tritongemm.tune.requested_rows import list_measured, list_searched, read_spans
from tritongemm.tune.requested_run import TuningOutcome
from tritongemm.workloads.m_spans import MSpan
from tritongemm.workloads.sibling_layers import join_rows, saved_by_joining


def list_planned(rows: Sequence[FormatRow], source: SizeSource, reporter: Reporter) -> list[FormatRow]:
    """Return the rows of a command's sizes or, for tables over M, of the sizes that are searched for them.

    Their counts are of the calls at exactly their M; a size at another M has the callers of its product.
    """
    spans = read_spans(rows, source, reporter.say)
    if not spans:
        return list(rows)
    every = [*rows, *(joined.row for joined in join_rows(rows))]
    known = {row.problem: row for row in every}
    callers = {row.problem.at(1): row.callers for row in every}
    searched, measured = list_searched(spans), len(list_measured(spans))
    tables = f"{len(spans)} table{'s' * (len(spans) != 1)} over M"
    reporter.say(f"{tables}: these sizes are searched, {measured - len(searched)} more are measured")
    return [known.get(p) or FormatRow(p, count=0.0, callers=callers.get(p.at(1), ())) for p in searched]


def print_tables(tables: Mapping[MSpan, MTable], rows: Sequence[FormatRow], reporter: Reporter) -> None:
    """Print the ranges of each table, how well they do at M held out, and what the rows' calls gain."""
    found = [table.records() for table in tables.values() if table.rows]
    for records in found:
        print_table(reporter, records)
    every = [record for records in found for record in records]
    print_held_out(reporter, every)
    reporter.wrong_libraries([record.library_fault for record in every])
    saved = saved_by_joining(join_rows(rows), {record.problem: record for record in every})
    print_gain(reporter, rows, every, saved)


def print_price(outcome: TuningOutcome, unconstrained: Sequence[Record], reporter: Reporter) -> None:
    """Print what the invariance of a run's rows costs, at each measured size and over all calls."""
    every = [record for table in outcome.tables.values() for record in table.records()] or outcome.records
    counts = {row.problem: row.count for row in outcome.rows}
    invariance.print_price(reporter, every, unconstrained, counts)

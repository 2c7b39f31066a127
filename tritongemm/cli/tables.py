"""Tables over M on the command line of `python -m tritongemm.tune`: which are asked for, and what is printed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.report.console import Reporter
from tritongemm.report.m_tables import name_product, print_gain, print_held_out, print_table
from tritongemm.tuning.m_table import MTable
from tritongemm.workloads.m_spans import SEARCH_BUDGET, MSpan, drop_small, group_spans
from tritongemm.workloads.sibling_layers import join_rows, joined_spans, saved_by_joining


def read_spans(rows: Sequence[FormatRow], args: argparse.Namespace, reporter: Reporter) -> list[MSpan]:
    """The spans of M that tables are asked for; none where sizes alone are. What is left out is said."""
    if args.workload is None and args.m_range is None:
        return []
    if args.workload is None:
        return group_spans(rows, args.m_range)
    kept, small = drop_small(rows)
    for product, share in small.items():
        reason = f"{share:.2%} of the workload's time, as far as its bytes and operations tell"
        reporter.say(f"left out: {name_product(product)}: {reason}")
    joined = {} if args.no_join else joined_spans(kept, args.m_range)
    for span, layers in joined.items():
        reporter.say(f"joined: {name_product(span.problem)}, M up to {span.high}: {', '.join(layers)}")
    return [*group_spans(kept, args.m_range), *joined]


def list_searched(spans: Sequence[MSpan]) -> list[Problem]:
    """The sizes of tables that are tuned as any size is."""
    return [span.at(m) for span in spans for m in span.searched()]


def list_planned(rows: Sequence[FormatRow], args: argparse.Namespace, reporter: Reporter) -> list[FormatRow]:
    """The rows of a command's sizes or, where it asks for tables over M, of the sizes that are searched for them.

    Their counts are of the calls at exactly their M; a size at another M has the callers of its product.
    """
    spans = read_spans(rows, args, reporter)
    if not spans:
        return list(rows)
    every = [*rows, *(joined.row for joined in join_rows(rows))]
    known = {row.problem: row for row in every}
    callers = {row.problem.at(1): row.callers for row in every}
    searched, measured = list_searched(spans), len(list_measured(spans))
    reporter.say(f"{len(spans)} tables over M: these sizes are searched, {measured - len(searched)} more are measured")
    return [known.get(p) or FormatRow(p, count=0.0, callers=callers.get(p.at(1), ())) for p in searched]


def search_budgets(spans: Sequence[MSpan]) -> dict[Problem, int]:
    """Most configs tried at the searched M that no call is known to have, whose kernels race again at other M."""
    return {span.at(m): SEARCH_BUDGET for span in spans for m in span.searched() if m not in span.wanted}


def list_measured(spans: Sequence[MSpan]) -> list[Problem]:
    """All sizes of tables that are measured whatever is found, in the order of their rows."""
    return [span.at(m) for span in spans for m in span.ladder()]


def print_tables(tables: Mapping[MSpan, MTable], rows: Sequence[FormatRow], reporter: Reporter) -> None:
    """Print the ranges of each table, how well all of them do at M held out, and what the rows' calls gain."""
    found = [table.records() for table in tables.values() if table.rows]
    for records in found:
        print_table(reporter, records)
    every = [record for records in found for record in records]
    print_held_out(reporter, every)
    reporter.wrong_libraries([record.library_fault for record in every])
    saved = saved_by_joining(join_rows(rows), {record.problem: record for record in every})
    print_gain(reporter, rows, every, saved)

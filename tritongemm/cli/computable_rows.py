"""The rows of a command that its target can compute, and what is said of the others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tritongemm.cli import door, tables
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow, ResultsFile
from tritongemm.core.target import Target
from tritongemm.numerics.computable_families import is_computed_by, name_others
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.report.console import Reporter
from tritongemm.report.sizes import print_sizes
from tritongemm.search_spaces.loader import load_target, target_names


def select(rows: Sequence[FormatRow], target: Target, args: argparse.Namespace, reporter: Reporter) -> list[FormatRow]:
    """Return the rows that a target computes, and say which are left out.

    Rows of a workload or a model are left out one by one, and those that only another target computes, of a file for
    several targets, in one line. Any other row must be one that the target computes.

    Args:
        rows: of the command line or its file.
        target: of the run.
        args: of the command line.
        reporter: says what is left out.

    Raises:
        InputError: a row must be computed and can't be, or none is left; names file, row and reason.
    """
    kept, others, lacking = list[FormatRow](), list[str](), list[str]()
    for row in rows:
        complaint = _complaint(row, target, args)
        if not complaint:
            kept.append(row)
        elif _is_for_another_target(row):
            others.append(complaint)
        elif _may_lack_rows(args):
            lacking.append(f"left out: {complaint}")
        else:
            raise InputError(complaint)
    reporter.say_alike(lacking)
    if not kept:
        path = args.gemm_size_file or args.workload
        raise InputError(others[0] if others else f"{path}: {target.name} can compute none of its products")
    if others:
        more = f", and {len(others) - 1} others" if len(others) > 1 else ""
        reporter.say(f"left out, as another target computes it{more}: {others[0]}")
    return kept


def print_selected(asked: ResultsFile, target: Target, args: argparse.Namespace, reporter: Reporter) -> int:
    """Print the sizes that would be tuned on a target, and on the standard error each row that would not, with why.

    Args:
        asked: the rows of the command line or its file.
        target: of the run.
        args: of the command line.
        reporter: prints the table.

    Returns:
        The exit status that tuning would end with because of these rows.
    """
    complaints = [(row, _complaint(row, target, args)) for row in asked.rows]
    kept = [row for row, complaint in complaints if not complaint]
    print_sizes(reporter, tables.list_planned(kept, args, reporter))
    refused = [*filter(None, (complaint for _, complaint in complaints)), *(r.reason for r in asked.untunable)]
    door.tell_alike((f"refused: {complaint}" for complaint in refused), args.verbose)
    if not _may_lack_rows(args) and any(why and not _is_for_another_target(row) for row, why in complaints):
        door.tell(
            "error: a run would end before it tunes any of these; remove what is refused, or name another --target"
        )
        return door.REFUSED
    return door.REFUSED if not kept else door.WRONG if asked.untunable else door.DONE


def _complaint(row: FormatRow, target: Target, args: argparse.Namespace) -> str:
    """Why a target can't compute a row, with where it stands; "" if it can."""
    supported = registry.get(Family, row.problem.family).supports(row.problem, target)
    if supported:
        return ""
    path = args.gemm_size_file or args.workload
    where = "" if path is None else f"{row.where(path)}: "
    return f"{where}{row.problem.key}: {supported}{name_others(row.problem, target)}"


def _is_for_another_target(row: FormatRow) -> bool:
    """Whether a row that the run's target can't compute is of a file for several targets, and another computes it."""
    return row.optional and is_computed_by(row.problem, map(load_target, target_names()))


def _may_lack_rows(args: argparse.Namespace) -> bool:
    """Whether the sizes are a workload's or a model's, which are tuned as far as the target computes them."""
    return args.workload is not None or args.model_dir is not None

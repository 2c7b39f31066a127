"""The command line of `tritongemm tune`, which prints sizes, tables over M and results."""

import argparse
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tritongemm.cli import arguments, model_options, options, search_options, shell, tuned_rows
from tritongemm.codegen.modules import winner_path
from tritongemm.core.errors import InputError, UntunableRowsWarning
from tritongemm.core.format_row import FormatRow, ResultsFile
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.numerics.computable_families import defaults_on, name_others
from tritongemm.plugins import registry
from tritongemm.report.console import Reporter
from tritongemm.report.page.time_to_quality import quality_over_time
from tritongemm.report.tables import (
    print_gain,
    print_held_out,
    print_invariance,
    print_retimed,
    print_sizes,
    print_table,
    print_verified,
)
from tritongemm.results import history
from tritongemm.results.store import Store
from tritongemm.tune import requested_rows, requested_run, session
from tritongemm.tune.cluster import open_machine
from tritongemm.tune.m_table import MTable
from tritongemm.tune.request import Devices, Outputs, SizeSource, TuneRequest
from tritongemm.tune.requested_rows import list_measured, list_searched, read_spans
from tritongemm.tune.requested_run import TuningOutcome, TuningStopped
from tritongemm.tune.revalidate import Revalidation, require_results
from tritongemm.workloads import sizes
from tritongemm.workloads.m_spans import MSpan
from tritongemm.workloads.sibling_layers import join_rows, saved_by_joining

parser = options.parser


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    args = options.parse(argv)
    request = read_request(args)
    with Reporter(args.verbose, seconds=request.search.seconds) as reporter:
        if args.print_sizes:
            return _print_sizes(request, reporter)
        if args.compare_wo_tuning or args.benchmark:
            return _run_stored(args, request, reporter)
        return run(request, reporter, ["tune", *argv], args.compare, args.unconstrained)


def read_request(args: argparse.Namespace) -> TuneRequest:
    """Return the request of the parsed options."""
    named = args.gemm_size_file or args.workload
    is_workload = args.workload is not None
    return TuneRequest(
        sizes=SizeSource(
            path=None if named is None else Path(named),
            is_workload=is_workload,
            m=args.m,
            n=args.n,
            k=args.k,
            m_range=args.m_range,
            join=not args.no_join,
            model=model_options.read_model(args),
            defaults=options.given_defaults(args),
        ),
        devices=Devices(args.target, args.gpus, args.ngpus, args.ray, args.num_threads),
        search=search_options.read_search(args),
        outputs=Outputs(_place(args.output), args.to, _place(args.profile_file), args.resume, args.keep),
        protocol=search_options.read_protocol(args),
        profiler=args.profiler,
        timeout_s=args.timeout,
        stop="generate" if args.generate_only else "compile" if args.compile_only else "",
        invariant=args.invariant or False,
        invariant_runs=args.invariant_runs,
    )


def _place(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def run(
    request: TuneRequest,
    reporter: Reporter,
    command: Sequence[str],
    compare: bool = False,
    unconstrained: str | None = None,
) -> int:
    """Tune what is requested and print the results; return the exit status."""
    others = [] if unconstrained is None else list(sizes.from_results(Path(unconstrained), request.sizes.defaults).rows)
    try:
        outcome = requested_run.tune(request, reporter)
    except TuningStopped as stopped:
        print(file=sys.stderr)  # a line end behind the terminal's ^C
        shell.report(f"{stopped}. Go on with:")
        # In full, as it is to be copied. Going on with --no-resume, or gradlib's --all, would start over.
        words = [word for word in command if word not in ("--no-resume", "--no_resume", "--all")]
        print(f"  {arguments.started_as()} {shlex.join(words)}", file=sys.stderr)
        raise
    _print_outcome(outcome, request, reporter, compare)
    if request.invariant and not request.stop:
        print_price(outcome, [row.record for row in others if row.record is not None], reporter)
    reporter.say_alike(f"failed: {problem.key}: {reason}" for problem, reason in outcome.failures.items())
    reporter.say_alike(f"not tuned: {row.reason}" for row in outcome.untunable)
    return shell.WRONG if outcome.failures or outcome.untunable else shell.DONE


def _print_outcome(outcome: TuningOutcome, request: TuneRequest, reporter: Reporter, compare: bool) -> None:
    counts = ", ".join(f"{n} {s}" for s, n in sorted(reporter.statuses.items()))
    if request.stop:
        reporter.say(f"modules: {outcome.folder}" + (f"; compiled: {counts}" if counts else ""))
        return
    records, store = outcome.records, outcome.store
    if records and (compare or not outcome.tables):
        reporter.records(records, outcome.target, compare=compare)
        if compare:
            reporter.backends(records, lambda problem: store.trials(problem).values())
    print_tables(outcome.tables, outcome.rows, reporter)
    if counts:
        reporter.say(f"trials: {counts}")
    _print_quality(outcome.tuned, store, reporter)
    if records:
        modules = any(winner_path(p, outcome.folder).exists() for p in outcome.problems)
        reporter.say(f"results: {store.path}" + (f"; winners as modules: {outcome.folder}" if modules else ""))
    for line in () if request.search.server else tuned_rows.list_calls(records):
        reporter.say(line)


def _print_quality(tuned: Sequence[Problem], store: Store, reporter: Reporter) -> None:
    """Print how soon a run over several sizes was as fast as at its end; a journal that can't be read is skipped."""
    measured = [r.problem for r in map(store.record, tuned) if r is not None and not r.predicted]
    if len(measured) > 1:
        with suppress(InputError):
            curve = quality_over_time(history.read(store.journal, measured))
            if curve.points:
                reporter.say(f"time to quality: {curve.describe()}")


def _print_sizes(request: TuneRequest, reporter: Reporter) -> int:
    """Print the sizes that would be tuned, and why others would not; return the exit status that a run would have."""
    source = request.sizes
    with open_machine(request, reporter.say) as (machine, _):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunableRowsWarning)  # each such row is printed
        asked = requested_rows.read_rows(request, machine.target, reporter.say)
    complaints = [(row, requested_rows.complain(row, machine.target, source)) for row in asked.rows]
    kept = [row for row, complaint in complaints if not complaint]
    print_sizes(reporter, list_planned(kept, source, reporter))
    refused = [*filter(None, (complaint for _, complaint in complaints)), *(r.reason for r in asked.untunable)]
    shell.report_alike((f"refused: {complaint}" for complaint in refused), reporter.verbose)
    of_others = requested_rows.is_for_another_target
    if not source.may_lack and any(why and not of_others(row) for row, why in complaints):
        shell.report(
            "error: a run would end before it tunes any of these; remove what is refused, or name another --target"
        )
        return shell.REFUSED
    return shell.REFUSED if not kept else shell.WRONG if asked.untunable else shell.DONE


# --- stored results ---------------------------------------------------------------------------------------------------


def _run_stored(args: argparse.Namespace, request: TuneRequest, reporter: Reporter) -> int:
    """Verify or time the results of a file; return 1 if any is wrong, damaged, or can't be run."""
    path = args.gemm_size_file
    with open_machine(request, reporter.say) as (machine, cluster):
        asked = _stored_rows(path, request, machine.target)
        if not machine.devices:
            machine = tuned_rows.find_machine(request.devices.target, (row.target for row in asked.rows))
        protocol = session.make_protocol(request, machine)
        with session.open_session(request, machine, protocol, cluster) as tools:
            reporter.say_alike(f"left out: {row.reason}" for row in asked.damaged)
            reporter.say(machine.why)
            again = Revalidation(tools.evaluators[0], tools.pool, reporter)
            if args.compare_wo_tuning:
                verified = again.verify(asked.rows)
                print_verified(reporter, verified, again.evaluator.verification)
                trials = [result.trial for result in verified]
            else:
                retimed = again.retime(asked.rows, registry.baseline().name)
                print_retimed(reporter, retimed)
                trials = [result.trial for result in retimed]
            reporter.say_alike(_list_refused(asked.rows, trials, path, again.evaluator.target))
    wrong = asked.damaged or any(trial.status != "ok" for trial in trials)
    return shell.WRONG if wrong else shell.DONE


def _stored_rows(path: str, request: TuneRequest, target: Target) -> ResultsFile:
    """Return the results of a file, and its damaged rows."""
    found = sizes.from_results(Path(path), defaults_on(target, request.sizes.defaults))
    if not found.rows:
        found.require_undamaged()
    return replace(found, rows=tuple(require_results(found.rows, path)))


def _list_refused(rows: Sequence[FormatRow], trials: Sequence[Trial], path: str, target: Target) -> Iterator[str]:
    """Yield a line for each result that was not run: its place in the file and the reason."""
    for row, trial in zip(rows, trials, strict=True):
        if trial.status == "refused":
            reason = f"{trial.reason}{name_others(row.problem, target)}"
            yield f"refused: {row.where(path)}: {row.problem.key}: {reason}"


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
    print_invariance(reporter, every, unconstrained, counts)

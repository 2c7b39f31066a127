"""The command line: `python -m tritongemm.tune`."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.cli import computable_rows, door, model_options, options, servers, session, tables, tuned_rows
from tritongemm.cli.cluster import Cluster, open_cluster
from tritongemm.codegen.modules import winner_path
from tritongemm.core.errors import InputError, TritonGemmError, UntunableRowsWarning
from tritongemm.core.format_row import DamagedRow, FormatRow, ResultsFile
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.numerics.computable_families import name_others
from tritongemm.report import candidates_csv
from tritongemm.report.console import Reporter
from tritongemm.report.quality import quality_over_time
from tritongemm.report.revalidation import print_retimed, print_verified
from tritongemm.results import history
from tritongemm.results.run_files import RunFiles, holding_module_folder
from tritongemm.results.store import Store
from tritongemm.results.told_file import ToldFile
from tritongemm.runtime.machine import Machine, find_machine
from tritongemm.tuning.m_table import MTable
from tritongemm.tuning.revalidate import Revalidation, require_results
from tritongemm.tuning.roster import choose_roster
from tritongemm.tuning.run import TuningRun
from tritongemm.tuning.table_tuning import TableTuning
from tritongemm.workloads import sizes
from tritongemm.workloads.m_spans import MSpan


@door.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.door`."""
    args = options.parse(argv)
    with Reporter(args.verbose, seconds=args.budget[1] if args.budget else 0.0) as reporter:
        return _run(args, reporter, shlex.join(argv))


def _run(args: argparse.Namespace, reporter: Reporter, command: str) -> int:
    with open_cluster(args, reporter.say) as cluster:
        machine = cluster.machine if cluster else find_machine(args.target, args.gpu_ids, args.ngpus)
        return _run_on(machine, cluster, args, reporter, command)


def _run_on(
    machine: Machine, cluster: Cluster | None, args: argparse.Namespace, reporter: Reporter, command: str
) -> int:
    if args.print_sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunableRowsWarning)  # each such row is printed
            sizes_asked = _asked_rows(args, machine)
        return computable_rows.print_selected(sizes_asked, machine.target, args, reporter)
    stored = args.compare_wo_tuning or args.benchmark
    asked = _asked_rows(args, machine) if stored and not machine.devices else None
    if asked is not None:
        machine = tuned_rows.find_machine(args.target, (row.target for row in asked.rows))
    protocol = session.make_protocol(args, machine)
    with ExitStack() as stack:
        tools = stack.enter_context(session.open_session(args, machine, protocol, cluster))
        asked = asked or _asked_rows(args, machine)
        rows: Sequence[FormatRow] = asked.rows
        reporter.say_alike(f"left out: {row.reason}" for row in asked.damaged)
        if not stored:  # there a row that can't be computed costs itself alone
            rows = computable_rows.select(rows, machine.target, args, reporter)
        remarks = [machine.why]
        libtype = args.libtype if args.server is None else servers.choose_kernels(args, rows, machine, remarks.append)
        roster = choose_roster(libtype, bool(machine.devices), args.compile_only)
        for remark in remarks:
            reporter.say(remark)
        for name, reason in roster.left_out.items() if args.verbose or args.libtype == "all" else ():
            reporter.say(f"{name} does not race: {reason}")
        suffix = f"_{args.server}" if args.server else ""
        output = Path(args.output or f"output/tuning_results_{machine.target.name}{suffix}.yaml")
        told_file = None if stored else ToldFile.find(output, args.to)
        if told_file is not None:
            told_file.check()
            rows, output = _wanted(rows, told_file, args, machine, reporter), told_file.results
        if args.profile_file is not None:
            others = [Path(path) for path in (args.gemm_size_file, args.workload, args.output) if path is not None]
            candidates_csv.check(Path(args.profile_file), [*RunFiles(output).every(), *others])
        plan = session.make_options(args, machine, roster.backends, protocol, output)
        if stored:
            again, file = Revalidation(tools.evaluators[0], tools.pool, reporter), args.gemm_size_file
            status = (
                _verify(again, rows, file, reporter)
                if args.compare_wo_tuning
                else _retime(again, rows, file, plan.library, reporter)
            )
            return max(status, door.WRONG if asked.damaged else door.DONE)
        spans = tables.read_spans(rows, args, reporter)
        if spans and machine.devices and not plan.budget and args.strategy is None:
            plan = replace(plan, budgets=tables.search_budgets(spans))
        # rows of several GPUs may be of one problem
        problems = tables.list_searched(spans) if spans else list(dict.fromkeys(row.problem for row in rows))
        order = tables.list_measured(spans) if spans else problems
        if plan.stop == "compile" or not (machine.devices or plan.stop):
            reporter.compilers = tools.pool.jobs
        store = stack.enter_context(session.open_store(args, machine, protocol, plan, output, order))
        stack.enter_context(holding_module_folder(plan.folder, output))
        run = TuningRun(tools.evaluators, tools.pool, store, plan, reporter)
        status = _tune(_Asked(rows, problems, spans), run, args, command, told_file)
        return max(status, _report_untunable(asked.untunable, reporter))


def _asked_rows(args: argparse.Namespace, machine: Machine) -> ResultsFile:
    """What the command line asks for, with the rows of its file that can't be used; of sizes none may be damaged.

    Raises:
        InputError: a file can't be read, a row of sizes is damaged, or none can be tuned.
    """
    defaults = options.defaults(args, machine.target)
    if args.model_dir is not None:
        model = model_options.read_model(args, defaults)
        for remark in model.remarks:
            door.tell(remark)
        return ResultsFile(rows=tuple(model.rows))
    named = args.gemm_size_file or args.workload
    if args.server is not None and named is None and (args.m is None or args.top_k is not None):
        server, tokens = servers.server_format(args.server, args.groups), () if args.m is None else (args.m,)
        return ResultsFile(rows=tuple(server.list_sizes(args.n, args.k, defaults, args.top_k or 1, tokens)))
    if named is None:
        return ResultsFile(rows=tuple(sizes.from_options(args.m or args.m_range[0], args.n, args.k, defaults)))
    path = Path(named)
    if not (args.compare_wo_tuning or args.benchmark):
        found = sizes.from_results(path, defaults).require_undamaged()
        if not found.rows:
            reason = f"{found.untunable[0].reason}; no row of the file can" if found.untunable else ""
            raise InputError(reason or f"{path} contains no sizes; write one line per size")
        return found
    found = sizes.from_results(path, defaults)
    if not found.rows:
        found.require_undamaged()
    return replace(found, rows=tuple(require_results(found.rows, args.gemm_size_file)))


def _wanted(
    rows: Sequence[FormatRow], told_file: ToldFile, args: argparse.Namespace, machine: Machine, reporter: Reporter
) -> list[FormatRow]:
    """The rows that another tool's file of results does not tell yet."""
    source = None if args.gemm_size_file is None else Path(args.gemm_size_file)
    wanted, damaged = told_file.wanted(rows, source, machine.target, not args.resume, args.family)
    reporter.say_alike(f"kept, but not understood: {row.reason}" for row in damaged)
    if len(wanted) < len(rows):
        reporter.say(
            f"{len(rows) - len(wanted)} of {len(rows)} sizes are not tuned: {told_file.path} tells them already"
        )
    return wanted


def _tell(told_file: ToldFile, store: Store, asked: _Asked, family: str, reporter: Reporter) -> None:
    """Tell results in another tool's file, and say what it can't hold."""
    written = told_file.write(store, asked.problems, asked.rows, family)
    reporter.say_alike(f"{told_file.path}: {record.problem.key}: {reason}" for record, reason in written.untold)
    for name in filter(None, written.files):
        reporter.say(f"written: {told_file.place / name}")
    lost = f"; {len(written.untold)} lost something, which {store.path} has" if written.untold else ""
    reporter.say(f"{told_file.path}: {written.told} results told{lost}")


def _verify(again: Revalidation, rows: Sequence[FormatRow], path: str, reporter: Reporter) -> int:
    """Check stored results; 1 if any is wrong, or can't be run or checked."""
    results = again.verify(rows)
    print_verified(reporter, results, again.evaluator.verification)
    reporter.say_alike(_list_refused(rows, [r.trial for r in results], path, again.evaluator.target))
    return door.WRONG if any(r.trial.status != "ok" for r in results) else door.DONE


def _retime(again: Revalidation, rows: Sequence[FormatRow], path: str, baseline: str, reporter: Reporter) -> int:
    """Time stored results beside the baseline; 1 if any can't be timed."""
    results = again.retime(rows, baseline)
    print_retimed(reporter, results)
    reporter.say_alike(_list_refused(rows, [r.trial for r in results], path, again.evaluator.target))
    return door.WRONG if any(r.trial.status != "ok" for r in results) else door.DONE


def _list_refused(rows: Sequence[FormatRow], trials: Sequence[Trial], path: str, target: Target) -> Iterator[str]:
    """Say of each result that was not run where it stands in the file and why."""
    for row, trial in zip(rows, trials, strict=True):
        if trial.status == "refused":
            reason = f"{trial.reason}{name_others(row.problem, target)}"
            yield f"refused: {row.where(path)}: {row.problem.key}: {reason}"


@contextmanager
def _merging(
    store: Store, problems: Sequence[Problem], command: str, write_others: Callable[[], None]
) -> Iterator[None]:
    """Merge what is done whatever happens, and after Ctrl-C say how to go on."""
    try:
        yield
    except Exception:
        with suppress(TritonGemmError), door.uninterrupted():  # the first fault is the one to tell
            store.merge(problems)
        raise
    except KeyboardInterrupt:
        with door.uninterrupted():
            store.merge(problems)
            write_others()
        done = store.path if store.path.exists() else store.journal
        print(file=sys.stderr)  # the line ends that the terminal began with ^C
        door.tell(f"stopped; what is done is in {done}. Go on with:")
        # Whole, as it is to be copied. Going on with --no-resume would start over.
        print(
            f"  python -m tritongemm.tune {command.replace(' --no-resume', '').replace(' --no_resume', '')}",
            file=sys.stderr,
        )
        raise
    with door.uninterrupted():
        store.merge(problems)
        write_others()


@dataclass(frozen=True)
class _Asked:
    """What a tuning command asks for.

    Attributes:
        rows: of the command line or its file.
        problems: sizes that are tuned.
        spans: of the M of tables; none where sizes alone are asked for.
    """

    rows: Sequence[FormatRow]
    problems: list[Problem]
    spans: Sequence[MSpan]


def _tune(asked: _Asked, run: TuningRun, args: argparse.Namespace, command: str, told_file: ToldFile | None) -> int:
    problems, spans = asked.problems, asked.spans
    store, reporter, folder = run.store, run.watcher, run.options.folder
    assert isinstance(reporter, Reporter)
    wanted = [p for p in problems if store.record(p) is None]
    if len(wanted) < len(problems):
        count = f"{len(problems) - len(wanted)} of {len(problems)} sizes"
        reporter.say(f"{count} are in {store.path} already; --no-resume (in gradlib --all) measures them anew")

    def write_others() -> None:
        if told_file is not None and not run.options.stop:
            _tell(told_file, store, asked, args.family, reporter)
        if args.profile_file is not None:
            count = candidates_csv.write(Path(args.profile_file), store, problems, run.unstored)
            reporter.say(f"profile: {args.profile_file}: {count} rows")

    found: dict[MSpan, MTable] = {}
    with _merging(store, tables.list_measured(spans) or problems, command, write_others):
        failures = run.tune(problems)
        if not run.options.stop:
            session.write_missing_winners(problems, run)
            found = TableTuning(run).tune(spans) if spans else {}
            session.race_layers(asked.rows, run, args)
    counts = ", ".join(f"{n} {s}" for s, n in sorted(reporter.statuses.items()))
    if run.options.stop:
        reporter.say(f"modules: {folder}" + (f"; compiled: {counts}" if counts else ""))
    else:
        if args.compare or not spans:
            _print_records([r for r in map(store.record, problems) if r is not None], run, reporter, args.compare)
        tables.print_tables(found, asked.rows, reporter)
        if counts:
            reporter.say(f"trials: {counts}")
        _print_quality(wanted, store, reporter)
        _say_results(problems, run, reporter, bool(args.server))
        session.finish_candidates(wanted, run, args.keep)
        reporter.say_alike(f"failed: {problem.key}: {reason}" for problem, reason in failures.items())
    return door.WRONG if failures else door.DONE


def _say_results(problems: Sequence[Problem], run: TuningRun, reporter: Reporter, for_server: bool) -> None:
    """Say where the results are and, unless they are for a server's own kernel, which calls they serve."""
    done, folder = [r for r in map(run.store.record, problems) if r is not None], run.options.folder
    if done:
        modules = any(winner_path(p, folder).exists() for p in problems)
        reporter.say(f"results: {run.store.path}" + (f"; winners as modules: {folder}" if modules else ""))
    for line in () if for_server else tuned_rows.list_calls(done):
        reporter.say(line)


def _report_untunable(rows: Sequence[DamagedRow], reporter: Reporter) -> int:
    """Say which rows of a file were not tuned, as nothing here computes them; 1 if there are any."""
    reporter.say_alike(f"not tuned: {row.reason}" for row in rows)
    return door.WRONG if rows else door.DONE


def _print_quality(tuned: Sequence[Problem], store: Store, reporter: Reporter) -> None:
    """Say how soon a run over several sizes was as fast as at its end; a journal that can't be read costs the line."""
    measured = [r.problem for r in map(store.record, tuned) if r is not None and not r.predicted]
    if len(measured) > 1:
        with suppress(InputError):
            curve = quality_over_time(history.read(store.journal, measured))
            if curve.points:
                reporter.say(f"time to quality: {curve.tell()}")


def _print_records(records: list[Record], run: TuningRun, reporter: Reporter, compare: bool) -> None:
    if records:
        reporter.records(records, run.evaluators[0].target, compare=compare)
        if compare:
            reporter.backends(records, lambda problem: run.store.trials(problem).values())

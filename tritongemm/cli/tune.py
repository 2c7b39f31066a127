"""The command line: `python -m tritongemm.tune`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tritongemm.cli import options, session
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.report import candidates_csv
from tritongemm.report.console import Reporter
from tritongemm.report.revalidation import print_retimed, print_verified
from tritongemm.results.store import Store, run_files
from tritongemm.runtime.machine import Machine, find_machine
from tritongemm.tuning.revalidate import Revalidation, require_results
from tritongemm.tuning.roster import choose_roster
from tritongemm.tuning.run import TuningRun
from tritongemm.workloads import sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 if a result is wrong or a size failed, 2 for bad input."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = options.parse(argv)
    with Reporter(args.verbose) as reporter, _stopped_like_ctrl_c():
        try:
            return _run(args, reporter, shlex.join(argv))
        except TritonGemmError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """What a batch system sends, or a terminal that is closed, ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(args: argparse.Namespace, reporter: Reporter, command: str) -> int:
    machine = find_machine(args.target, args.gpu_ids, args.ngpus)
    protocol = session.make_protocol(args, machine)
    with ExitStack() as stack:
        tools = stack.enter_context(session.open_session(args, machine, protocol))
        rows = _rows(args, machine)
        if not (args.compare_wo_tuning or args.benchmark):  # there a row that can't be computed costs itself alone
            _require_families(rows, machine, args.gemm_size_file)
        roster = choose_roster(args.libtype, bool(machine.devices), args.compile_only)
        reporter.say(machine.why)
        for name, reason in roster.left_out.items() if args.verbose or args.libtype == "all" else ():
            reporter.say(f"{name} does not race: {reason}")
        output = Path(args.output or f"output/tuning_results_{machine.target.name}.yaml")
        if args.profile_file is not None:
            sizes_file = [] if args.gemm_size_file is None else [Path(args.gemm_size_file)]
            candidates_csv.check(Path(args.profile_file), [*run_files(output), *sizes_file])
        plan = session.make_options(args, machine, roster.backends, protocol, output)
        if args.compare_wo_tuning or args.benchmark:
            folder = plan.folder
            if not args.keep:  # modules that a run kept have the same names
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tritongemm-")))
            again = Revalidation(tools.evaluators[0], tools.pool, folder, reporter)
            if args.compare_wo_tuning:
                return _verify(again, rows, args.gemm_size_file, reporter)
            return _retime(again, rows, args.gemm_size_file, plan.library, reporter)
        problems = [row.problem for row in rows]
        store = stack.enter_context(session.open_store(args, machine, protocol, plan, output, problems))
        return _tune(problems, TuningRun(tools.evaluators, tools.pool, store, plan, reporter), args, command)


def _rows(args: argparse.Namespace, machine: Machine) -> list[FormatRow]:
    """What the command line asks for."""
    defaults = options.defaults(args, machine.target.fp8)
    if args.gemm_size_file is not None:
        rows = sizes.from_file(Path(args.gemm_size_file), defaults)
        only = args.compare_wo_tuning or args.benchmark
        return [*require_results(rows, args.gemm_size_file)] if only else rows
    return sizes.from_options(args.m, args.n, args.k, defaults)


def _require_families(rows: Sequence[FormatRow], machine: Machine, path: str | None) -> None:
    """Refuse problems that the target can't compute, whatever kernels there are.

    Raises:
        InputError: says which, where in the file of sizes, and why.
    """
    for row in rows:
        problem = row.problem
        supported = registry.get(Family, problem.family).supports(problem, machine.target)
        if not supported:
            where = "" if path is None else f"{row.where(path)}: "
            raise InputError(f"{where}{problem.key}: {supported}")


def _verify(again: Revalidation, rows: Sequence[FormatRow], path: str, reporter: Reporter) -> int:
    """Check stored results; 1 if any is wrong, or can't be run or checked."""
    results = again.verify(rows)
    print_verified(reporter, results)
    _print_refused(rows, [r.trial for r in results], path)
    return int(any(r.trial.status != "ok" for r in results))


def _retime(again: Revalidation, rows: Sequence[FormatRow], path: str, baseline: str, reporter: Reporter) -> int:
    """Time stored results beside the baseline; 1 if any can't be timed."""
    results = again.retime(rows, baseline)
    print_retimed(reporter, results)
    _print_refused(rows, [r.trial for r in results], path)
    return int(any(r.trial.status != "ok" for r in results))


def _print_refused(rows: Sequence[FormatRow], trials: Sequence[Trial], path: str) -> None:
    """Say of each result that was not run where it stands in the file and why."""
    for row, trial in zip(rows, trials, strict=True):
        if trial.status == "refused":
            print(f"refused: {row.where(path)}: {row.problem.key}: {trial.reason}", file=sys.stderr)


@contextmanager
def _merging(
    store: Store, problems: Sequence[Problem], command: str, write_profile: Callable[[], None]
) -> Iterator[None]:
    """Merge what is done whatever happens, and after Ctrl-C say how to go on."""
    try:
        yield
    except Exception:
        with suppress(TritonGemmError):  # the first fault is the one to tell
            store.merge(problems)
        raise
    except KeyboardInterrupt:
        store.merge(problems)
        write_profile()
        done = store.path if store.path.exists() else store.journal
        print(f"\nstopped; what is done is in {done}. Go on with:", file=sys.stderr)
        # Going on with --no-resume would start over.
        print(
            f"  python -m tritongemm.tune {command.replace(' --no-resume', '').replace(' --no_resume', '')}",
            file=sys.stderr,
        )
        raise
    store.merge(problems)
    write_profile()


def _tune(problems: list[Problem], run: TuningRun, args: argparse.Namespace, command: str) -> int:
    store, reporter, folder = run.store, run.watcher, run.options.folder
    assert isinstance(reporter, Reporter)
    done_before = sum(store.record(p) is not None for p in problems)
    if done_before:
        reporter.say(
            f"{done_before} of {len(problems)} sizes are in {store.path} already (--no-resume measures them anew)"
        )

    def write_profile() -> None:
        if args.profile_file is not None:
            count = candidates_csv.write(Path(args.profile_file), store, problems, run.unstored)
            reporter.say(f"profile: {args.profile_file}: {count} rows")

    with _merging(store, problems, command, write_profile):
        failures = run.tune(problems)
    counts = ", ".join(f"{n} {s}" for s, n in sorted(reporter.statuses.items()))
    if run.options.stop:
        reporter.say(f"modules: {folder}" + (f"; compiled: {counts}" if counts else ""))
    else:
        _print_records([r for r in map(store.record, problems) if r is not None], run, reporter, args.compare)
        if counts:
            reporter.say(f"trials: {counts}")
        if any(store.record(p) for p in problems):
            reporter.say(f"results: {store.path}; winners as modules: {folder}")
        for module in () if args.keep else folder.glob("generated_kernel_*.py"):
            module.unlink()
        for problem, reason in failures.items():
            print(f"failed: {problem.key}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _print_records(records: list[Record], run: TuningRun, reporter: Reporter, compare: bool) -> None:
    if records:
        reporter.records(records, run.evaluators[0].target, compare=compare)
        if compare:
            reporter.backends(records, lambda problem: run.store.trials(problem).values())

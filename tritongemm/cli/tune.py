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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.cli import options
from tritongemm.core import settings
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.support import SUPPORTED
from tritongemm.core.trial import PREDICTED
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.formats import FormatRow
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins import registry as plugins
from tritongemm.plugins.contracts import Evaluator, ExternalTimer, Family, Timer
from tritongemm.report import candidates_csv
from tritongemm.report.console import Reporter
from tritongemm.results.store import Store
from tritongemm.runtime import machine
from tritongemm.runtime.machine import Machine
from tritongemm.tuning import revalidate
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
    here = machine.find(args.target, args.gpu_ids, args.ngpus)
    rows = _rows(args, here)
    for problem in (r.problem for r in rows):
        refusal = plugins.get(Family, problem.family).supports(problem, here.target)
        if not refusal:
            raise InputError(f"{problem.key}: {refusal}")
    roster = choose_roster(args.libtype, bool(here.devices), args.compile_only)
    reporter.say(here.why)
    for name, reason in roster.left_out.items() if args.verbose or args.libtype == "all" else ():
        reporter.say(f"{name} does not race: {reason}")
    protocol = MeasureProtocol(
        timer=_timer(args.profiler, here),
        init=args.init_type,
        rotating_mb=args.rotating_tensor,
        iters=args.iters,
        warmup=args.warmup,
        err_ratio=args.err_ratio,
    )
    if args.profile_file is not None:
        candidates_csv.check(Path(args.profile_file))
    output = Path(args.output or f"output/tuning_results_{here.target.name}.yaml")
    stop = "generate" if args.generate_only else "compile" if args.compile_only else ""
    plan = TuningOptions(
        folder=output.parent / f"{output.stem}_kernels",
        strategy=args.strategy or ("guided" if here.devices and not stop else "exhaustive"),
        budget=args.budget[0],
        seconds=args.budget[1],
        finalists=args.finalists,
        backends=_watched(protocol.timer, roster.backends),
        algorithms=args.algorithms,
        margin=args.min_gain / 100,
        stop=stop,
        toolchain=machine.toolchain(here),
    )
    with ExitStack() as stack:
        compiler = BuildPool(ArtifactCache(settings.cache_folder()), args.num_threads, args.timeout, must_keep=True)
        stack.callback(compiler.close)
        judges = [*_judges(here, protocol, args.timeout)]
        for judge in judges:
            stack.callback(judge.close)
        if (args.compare_wo_tuning or args.benchmark) and not args.keep:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tritongemm-"))
            plan = replace(plan, folder=Path(folder))  # modules that a run kept have the same names
        if args.compare_wo_tuning:
            return revalidate.verify_results(rows, judges, compiler, plan, reporter)
        if args.benchmark:
            return revalidate.retime_results(rows, judges, compiler, plan, reporter)
        identity = _identity(protocol) if here.devices else {"timer": PREDICTED}
        problems = [r.problem for r in rows]
        opened = Store.open(
            output,
            here.target.name,
            plan.toolchain,
            identity,
            resume=args.resume,
            problems=problems,
            compute_units=here.target.compute_units,
        )
        store = stack.enter_context(opened)
        return _tune(problems, judges, compiler, store, plan, args, reporter, command)


def _identity(protocol: MeasureProtocol) -> dict[str, Any]:
    """What must agree for trials to be continued; an option added later counts where it is used."""
    fields = asdict(protocol)
    return {k: v for k, v in fields.items() if k != "err_ratio" or v}


def _rows(args: argparse.Namespace, here: Machine) -> list[FormatRow]:
    """What the command line asks for."""
    defaults = options.defaults(args, here.target.fp8)
    if args.gemm_size_file is not None:
        rows = sizes.from_file(Path(args.gemm_size_file), defaults)
        only = args.compare_wo_tuning or args.benchmark
        return [*revalidate.require_results(rows, args.gemm_size_file)] if only else rows
    return sizes.from_options(args.m, args.n, args.k, defaults)


def _timer(profiler: str | None, here: Machine) -> str:
    """The name of the timer to measure with, or `PREDICTED` where nothing can be measured.

    Events need nothing but the driver, count the gaps that users pay for as well, and cost a fifth of a profiler's
    call, so they are the default.

    Raises:
        InputError: the one asked for can't be used here.
    """
    default = MeasureProtocol.timer
    if profiler is None:
        return default if here.devices else PREDICTED
    support = SUPPORTED if profiler == "auto" else plugins.available(Timer, profiler)
    if not here.devices:
        also = "" if support else f"; and {support}"
        raise InputError(f"--profiler {profiler}: nothing runs here ({here.why}), so there is nothing to time{also}")
    if profiler == "auto":
        in_process = (t for t in plugins.every(Timer) if not isinstance(t, ExternalTimer))
        return next((t.name for t in in_process if t.vendor == here.vendor and t.available()), default)
    if not support:
        raise InputError(f"--profiler {profiler}: {support}; --profiler {default} needs nothing more than the driver")
    return profiler


def _watched(timer: str, backends: tuple[str, ...]) -> tuple[str, ...]:
    """The backends that can race under a timer.

    Raises:
        InputError: none can; says why.
    """
    external = plugins.get(Timer, timer) if timer != PREDICTED else None
    if not isinstance(external, ExternalTimer):
        return backends
    racing = tuple(b for b in backends if external.races(b))
    if backends and not racing:
        reasons = "; ".join(external.races(b).reason for b in backends)
        raise InputError(f"--profiler {timer}: no backend of this run can race: {reasons}")
    return racing


def _judges(here: Machine, protocol: MeasureProtocol, timeout: float) -> Iterator[Evaluator]:
    if not here.devices:
        yield OfflineEvaluator(here.target, timeout)
    for device in here.devices:
        yield GpuEvaluator(here.target, here.vendor, device, protocol, timeout)


@contextmanager
def _merging(store: Store, problems: Sequence[Problem], command: str, profile: Callable[[], None]) -> Iterator[None]:
    """Merge what is done whatever happens, and after Ctrl-C say how to go on."""
    try:
        yield
    except Exception:
        with suppress(TritonGemmError):  # the first fault is the one to tell
            store.merge(problems)
        raise
    except KeyboardInterrupt:
        store.merge(problems)
        profile()
        done = store.path if store.path.exists() else store.journal
        print(f"\nstopped; what is done is in {done}. Go on with:", file=sys.stderr)
        # Going on with --no-resume would start over.
        print(
            f"  python -m tritongemm.tune {command.replace(' --no-resume', '').replace(' --no_resume', '')}",
            file=sys.stderr,
        )
        raise
    store.merge(problems)
    profile()


def _tune(
    problems: list[Problem],
    judges: list[Evaluator],
    compiler: BuildPool,
    store: Store,
    plan: TuningOptions,
    args: argparse.Namespace,
    reporter: Reporter,
    command: str,
) -> int:
    done_before = sum(store.record(p) is not None for p in problems)
    if done_before:
        reporter.say(
            f"{done_before} of {len(problems)} sizes are in {store.path} already (--no-resume measures them anew)"
        )
    pipeline = TuningRun(judges, compiler, store, plan, reporter)

    def profile() -> None:
        if args.profile_file is not None:
            count = candidates_csv.write(Path(args.profile_file), store, problems, pipeline.unstored)
            reporter.say(f"profile: {args.profile_file}: {count} rows")

    with _merging(store, problems, command, profile):
        failures = pipeline.tune(problems)
    counts = ", ".join(f"{n} {s}" for s, n in sorted(reporter.statuses.items()))
    if plan.stop:
        reporter.say(f"modules: {plan.folder}" + (f"; compiled: {counts}" if counts else ""))
        return 1 if failures else 0
    records = [r for r in map(store.record, problems) if r is not None]
    if records:
        reporter.records(records, judges[0].target, compare=args.compare)
        if args.compare:
            reporter.backends(records, lambda problem: store.trials(problem).values())
    if counts:
        reporter.say(f"trials: {counts}")
    if records:
        reporter.say(f"results: {store.path}; winners as modules: {plan.folder}")
    if not args.keep:
        for module in plan.folder.glob("generated_kernel_*.py"):
            module.unlink()
    for problem, reason in failures.items():
        print(f"failed: {problem.key}: {reason}", file=sys.stderr)
    return 1 if failures else 0

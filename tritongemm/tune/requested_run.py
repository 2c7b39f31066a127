"""Runs a `TuneRequest`, from its sizes to results on disk; command lines and Python call `tune`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tritongemm.core.config import DEFAULT_BACKEND
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import DamagedRow, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.hip_ext.machine import Machine
from tritongemm.measure.invariance import LIBRARY, Invariance, possible_orders
from tritongemm.plugins.contracts import Watcher
from tritongemm.results import candidates_csv
from tritongemm.results.run_files import RunFiles, holding_module_folder
from tritongemm.results.store import Store
from tritongemm.results.tuned_file import TunedFile
from tritongemm.system.stop_signals import uninterrupted
from tritongemm.tune import order_choice, requested_rows, roster, servers, session
from tritongemm.tune.cluster import Cluster, open_machine
from tritongemm.tune.m_table import MTable
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.request import TuneRequest, effort
from tritongemm.tune.roster import choose_roster
from tritongemm.tune.run import TuningRun
from tritongemm.tune.table_tuning import TableTuning
from tritongemm.workloads.m_spans import MSpan
from tritongemm.workloads.sibling_layers import JoinedRow, join_rows

_SEARCH = 0.6  # of a run's seconds where races of tables over M or of layers follow, which need the rest


class TuningStopped(KeyboardInterrupt):
    """A run was interrupted; the same request continues it.

    Attributes:
        done: the file that has the finished work.
    """

    def __init__(self, done: Path) -> None:
        super().__init__(f"stopped; what is done is in {done}")
        self.done = done


@dataclass(frozen=True)
class TuningOutcome:
    """The outcome of a run."""

    target: Target  # what was tuned for
    rows: Sequence[FormatRow]  # what was asked for
    problems: Sequence[Problem]  # sizes that were searched or had a result already
    tuned: Sequence[Problem]  # those of them that had none
    failures: Mapping[Problem, str]  # reasons of the problems that failed
    tables: Mapping[MSpan, MTable]  # of the spans of M that were asked for
    untunable: Sequence[DamagedRow]  # rows of a file that are right and of products that nothing here computes
    store: Store  # results and trials; closed, so it can only be read
    folder: Path  # where modules of winners are

    @property
    def records(self) -> list[Record]:
        """The results of the problems, in their order."""
        return [record for record in map(self.store.record, self.problems) if record is not None]


def tune(request: TuneRequest, watcher: Watcher) -> TuningOutcome:
    """Tune what a request names, and write results as they are made.

    Raises:
        InputError: the sizes can't be read, or what is asked for contradicts itself.
        OutputError: a place can't be written, or is held by another run.
        TuningStopped: the run was interrupted, by Ctrl-C or a signal to stop; finished work is on disk.
    """
    with open_machine(request, watcher.say) as (machine, cluster):
        return _tune_on(machine, cluster, request, watcher)


def _tune_on(machine: Machine, cluster: Cluster | None, request: TuneRequest, watcher: Watcher) -> TuningOutcome:
    protocol = session.make_protocol(request, machine)
    search, outputs = request.search, request.outputs
    with ExitStack() as stack:
        tools = stack.enter_context(session.open_session(request, machine, protocol, cluster))
        asked = requested_rows.read_rows(request, machine.target, watcher.say)
        rows: Sequence[FormatRow] = requested_rows.select(asked.rows, machine.target, request.sizes, watcher)
        backends = _choose_backends(request, rows, machine, watcher)
        suffix = f"_{search.server}" if search.server else "_invariant" if request.invariant else ""
        output = outputs.path or Path(f"output/tuning_results_{machine.target.name}{suffix}.yaml")
        tuned_file = TunedFile.find(output, outputs.to)
        if tuned_file is not None:
            tuned_file.check()
            rows, output = _wanted(rows, tuned_file, request, machine.target, watcher), tuned_file.results
        if outputs.candidates is not None:
            others = [path for path in (request.sizes.path, outputs.path) if path is not None]
            candidates_csv.check(outputs.candidates, [*RunFiles(output).every(), *others])
        plan = session.make_options(request, machine, backends, protocol, output)
        spans = requested_rows.read_spans(rows, request.sizes, watcher.say)
        if spans and machine.devices and not (plan.budget or search.strategy or effort(search.effort).strategy):
            plan = replace(plan, budgets=requested_rows.search_budgets(spans))
        # rows of several GPUs may be of one problem
        problems = requested_rows.list_searched(spans) if spans else list(dict.fromkeys(row.problem for row in rows))
        order = requested_rows.list_measured(spans) if spans else problems
        joined = join_rows(rows) if spans and request.sizes.join else []
        if plan.stop == "compile" or not (machine.devices or plan.stop):
            watcher.compilers = tools.pool.jobs
        store = stack.enter_context(session.open_store(request, machine, protocol, plan, output, order))
        plan = _in_one_order(plan, request, order, store, joined, machine.target)
        stack.enter_context(holding_module_folder(plan.folder, output))
        tuned = [p for p in problems if store.record(p) is None]
        if len(tuned) < len(problems):
            count = f"{len(problems) - len(tuned)} of {len(problems)} sizes"
            watcher.say(f"{count} are in {store.path} already; --no-resume (in gradlib --all) measures them anew")
        run = TuningRun(tools.evaluators, tools.pool, store, plan, watcher)

        def write_others() -> None:
            if tuned_file is not None and not plan.stop:
                _write_tuned_file(tuned_file, store, problems, rows, request, watcher)
            if outputs.candidates is not None:
                count = candidates_csv.write(outputs.candidates, store, problems, run.unstored)
                watcher.say(f"profile: {outputs.candidates}: {count} rows")

        tables: dict[MSpan, MTable] = {}
        with merging(store, order, write_others):
            if plan.invariance:
                open_another = partial(session.open_store, request, machine, protocol, plan, problems=order)
                order_choice.choose(run, order, open_another, rows, spans, bool(machine.devices) and not plan.stop)
            failures = run.tune(problems, _SEARCH if spans or search.server else 1.0)
            if not plan.stop:
                session.write_missing_winners(problems, run)
                tables = TableTuning(run).tune(spans) if spans else {}
                session.race_layers(rows, run, request)
        if not plan.stop:
            session.finish_candidates(tuned, run, outputs.keep)
        return TuningOutcome(
            machine.target, rows, problems, tuned, failures, tables, asked.untunable, store, plan.folder
        )


def _in_one_order(
    plan: TuningOptions,
    request: TuneRequest,
    problems: Sequence[Problem],
    store: Store,
    joined: Sequence[JoinedRow],
    target: Target,
) -> TuningOptions:
    """Return the options of a run, where rows shall be invariant with the orders that each product may have.

    Layers that may be computed as one product have only the first order, which that product has too. M of results that
    are stored already count as well: a product may have got its order by them.
    """
    if not request.invariant:
        return plan
    if request.invariant not in (True, "kernels", *LIBRARY):
        raise InputError(f"invariant must be true or one of {', '.join(LIBRARY)}, not {request.invariant!r}")
    searched = next(filter(roster.is_searched, plan.backends), DEFAULT_BACKEND if request.search.server else None)
    if searched is None:
        raise InputError("--invariant: only generated kernels state their order; let --libtype name triton")
    libraries = request.invariant in LIBRARY
    products = {problem.at(1) for problem in problems}
    stored = (r.problem for r in store.beside(frozenset(problems)) if r.problem.at(1) in products)
    orders = possible_orders([*problems, *stored], target, searched, plan.limits, request.invariant_runs)
    parts = {part.at(1) for one in joined for part in one.parts}
    orders |= {product: those[:1] for product, those in orders.items() if product in parts}
    return replace(plan, invariance=Invariance(orders, libraries))


def _choose_backends(
    request: TuneRequest, rows: Sequence[FormatRow], machine: Machine, watcher: Watcher
) -> tuple[str, ...]:
    """Return the backends that race, and report the machine and what does not race."""
    remarks, libtype = [machine.why], request.search.libtype
    if request.search.server is not None:
        libtype = servers.choose_kernels(request, rows, machine, remarks.append)
    roster = choose_roster(libtype, bool(machine.devices), request.stop == "compile")
    for remark in remarks:
        watcher.say(remark)
    for name, reason in roster.left_out.items() if watcher.verbose or request.search.libtype == "all" else ():
        watcher.say(f"{name} does not race: {reason}")
    return roster.backends


def _wanted(
    rows: Sequence[FormatRow], tuned_file: TunedFile, request: TuneRequest, target: Target, watcher: Watcher
) -> list[FormatRow]:
    """Return the rows whose results another tool's file does not have yet."""
    source = None if request.sizes.is_workload else request.sizes.path
    again, family = not request.outputs.resume, request.sizes.defaults.family
    wanted, damaged = tuned_file.wanted(rows, source, target, again, family)
    watcher.say_alike(f"kept, but not understood: {row.reason}" for row in damaged)
    if len(wanted) < len(rows):
        watcher.say(f"{len(rows) - len(wanted)} of {len(rows)} sizes are not tuned: {tuned_file.path} has them already")
    return wanted


def _write_tuned_file(
    tuned_file: TunedFile,
    store: Store,
    problems: Sequence[Problem],
    rows: Sequence[FormatRow],
    request: TuneRequest,
    watcher: Watcher,
) -> None:
    """Write results to another tool's file, and report what it can't hold."""
    written = tuned_file.write(store, problems, rows, request.sizes.defaults.family)
    watcher.say_alike(f"{tuned_file.path}: {record.problem.key}: {reason}" for record, reason in written.omitted)
    for name in filter(None, written.files):
        watcher.say(f"written: {tuned_file.place / name}")
    lost = f"; {len(written.omitted)} not, or not in full: {store.path} has all" if written.omitted else ""
    watcher.say(f"{tuned_file.path}: {written.count} results written{lost}")


@contextmanager
def merging(store: Store, problems: Sequence[Problem], write_others: Callable[[], None]) -> Iterator[None]:
    """Merge what is done whatever happens."""
    try:
        yield
    except Exception:
        with suppress(TritonGemmError), uninterrupted():  # the first fault is reported
            store.merge(problems)
        raise
    except KeyboardInterrupt:
        with uninterrupted():
            store.merge(problems)
            write_others()
        raise TuningStopped(store.path if store.path.exists() else store.journal) from None
    with uninterrupted():
        store.merge(problems)
        write_others()

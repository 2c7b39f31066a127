"""Opens the tools of a request's run, and turns its options into those of the stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.codegen.modules import candidates_path, winner_path
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.support import SUPPORTED
from tritongemm.core.trial import PREDICTED
from tritongemm.hip_ext.machine import Machine, toolchain
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, ExternalTimer, SearchedBackend, Timer
from tritongemm.results.run_files import module_folder
from tritongemm.results.store import Store
from tritongemm.search_spaces.loader import load_target
from tritongemm.system import settings
from tritongemm.tune import servers
from tritongemm.tune.cluster import Cluster
from tritongemm.tune.final_race import best_kernel
from tritongemm.tune.layer_tuning import LayerTuning
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.request import TuneRequest, effort
from tritongemm.tune.run import TuningRun


@dataclass(frozen=True)
class Session:
    """The tools of a run."""

    evaluators: list[Evaluator]
    pool: BuildPool


@contextmanager
def open_session(
    request: TuneRequest, machine: Machine, protocol: MeasureProtocol, cluster: Cluster | None = None
) -> Iterator[Session]:
    """Open evaluators and compilers, closed at the end; devices begin to start at once, which takes them seconds."""
    with ExitStack() as stack:
        evaluators: list[Evaluator] = [open_one() for open_one in openers(request, machine, protocol, cluster)]
        evaluators = evaluators or [OfflineEvaluator(machine.target, request.timeout_s)]
        for evaluator in evaluators:
            stack.callback(evaluator.close)
            if not request.stop:
                evaluator.start()
        yield Session(evaluators, stack.enter_context(open_pool(request, cluster)))


def openers(
    request: TuneRequest, machine: Machine, protocol: MeasureProtocol, cluster: Cluster | None
) -> list[Callable[[], Evaluator]]:
    """Return functions that start a new process on each device; none without a GPU."""
    if cluster:
        return cluster.openers(protocol, request.timeout_s)
    return [
        partial(GpuEvaluator, machine.target, machine.vendor, device, protocol, request.timeout_s)
        for device in machine.devices
    ]


@contextmanager
def open_pool(request: TuneRequest, cluster: Cluster | None) -> Iterator[BuildPool]:
    """Open compilers, closed at the end."""
    cache = ArtifactCache(settings.cache_folder())
    cache.check()
    pool = (
        cluster.pool(cache, request.devices.compilers, request.timeout_s)
        if cluster
        else BuildPool(cache, request.devices.compilers, request.timeout_s, must_keep=True)
    )
    with closing(pool):
        yield pool


def make_protocol(request: TuneRequest, machine: Machine) -> MeasureProtocol:
    """Return the measuring protocol of a run."""
    timer = pick_timer(request.profiler, machine)
    return replace(request.protocol, timer=timer, compares_rows=bool(request.invariant and machine.devices))


def make_options(
    request: TuneRequest, machine: Machine, backends: tuple[str, ...], protocol: MeasureProtocol, output: Path
) -> TuningOptions:
    """Return the options of a run."""
    search, stop, level = request.search, request.stop, effort(request.search.effort)
    is_timed = machine.devices and not stop
    is_limited = is_timed or stop == "generate" or search.strategy is not None
    own = level.budget if is_limited else level.untimed
    return TuningOptions(
        folder=module_folder(output),
        strategy=search.strategy or level.strategy or ("guided" if is_timed else "exhaustive"),
        budget=own if search.budget is None else search.budget[0],
        population=search.population,
        seconds=search.seconds,
        finalists=search.finalists,
        backends=_racing_under(protocol.timer, backends),
        algorithms=search.algorithms,
        margin=search.margin,
        stop=stop,
        toolchain=toolchain(machine),
        limits=replace(servers.limits(request, machine, backends), interpreted=not (machine.devices or stop)),
    )


def open_store(
    request: TuneRequest,
    machine: Machine,
    protocol: MeasureProtocol,
    options: TuningOptions,
    output: Path,
    problems: Sequence[Problem],
) -> Store:
    """Return the results file, held by this run until it is closed; raises as `Store.open`."""
    return Store.open(
        output,
        machine.target.name,
        options.toolchain,
        _identity(protocol) if machine.devices else _identity_of_predictions(machine),
        resume=request.outputs.resume,
        problems=problems,
        compute_units=machine.target.compute_units,
    )


def write_missing_winners(problems: Sequence[Problem], run: TuningRun) -> None:
    """Write missing modules of winners, e.g. because their folder was deleted before the run went on."""
    for problem in problems:
        record = run.store.record(problem)
        if record is None or winner_path(problem, run.options.folder).exists():
            continue
        raced = [t for (_, stage), t in run.store.trials(problem).items() if stage == "final"]
        with suppress(InputError):  # a template that is no longer there
            if winner := best_kernel(record, raced, run.evaluators[0].target, run.options):
                winner.write()


def finish_candidates(problems: Sequence[Problem], run: TuningRun, keep: bool) -> None:
    """Delete the modules of all candidates, or write them again with those that were tried."""
    for problem in problems:
        candidates_path(problem, run.options.folder).unlink(missing_ok=True)
        tried = list(dict.fromkeys(t.config for t in run.store.trials(problem).values())) if keep else []
        for backend in map(partial(registry.get, Backend), run.options.backends):
            if isinstance(backend, SearchedBackend) and (own := [c for c in tried if c.backend == backend.name]):
                backend.write_candidates(problem, own, run.evaluators[0].target, run.options.folder)


def race_layers(rows: Sequence[FormatRow], run: TuningRun, request: TuneRequest) -> None:
    """Race the same configs at all products of each layer, where a server launches one at them."""
    if request.search.top_k is not None:
        LayerTuning(run, servers.format_of(request).can_express).tune(rows)


def _identity(protocol: MeasureProtocol) -> dict[str, Any]:
    """Return what must agree for trials to be continued; an option added later counts where it is used."""
    fields = asdict(protocol)
    return {k: v for k, v in fields.items() if k not in ("err_ratio", "compares_rows", "sustained") or v}


def _identity_of_predictions(machine: Machine) -> dict[str, Any]:
    """Return what must agree for predictions to be continued: whose figures they are, if not the usual ones."""
    usual = load_target(machine.target.name).product
    return {"timer": PREDICTED, **({"figures": machine.product} if machine.product != usual else {})}


def pick_timer(profiler: str | None, machine: Machine) -> str:
    """Return the name of the timer to measure with, or `PREDICTED` where nothing can be measured.

    Events, the default, need nothing but the driver, count gaps that users pay for too, and are five times quicker to
    call.
    """
    default = MeasureProtocol.timer
    if profiler is None:
        return default if machine.devices else PREDICTED
    support = SUPPORTED if profiler == "auto" else registry.available(Timer, profiler)
    if not machine.devices:
        also = "" if support else f"; and {support}"
        raise InputError(f"--profiler {profiler}: nothing runs here ({machine.why}), so nothing can be timed{also}")
    if profiler == "auto":
        in_process = (t for t in registry.every(Timer) if not isinstance(t, ExternalTimer))
        return next((t.name for t in in_process if t.vendor == machine.vendor and t.available()), default)
    if not support:
        raise InputError(f"--profiler {profiler}: {support}; --profiler {default} needs nothing more than the driver")
    return profiler


def _racing_under(timer: str, backends: tuple[str, ...]) -> tuple[str, ...]:
    """Return the backends that can race under a timer."""
    external = registry.get(Timer, timer) if timer != PREDICTED else None
    if not isinstance(external, ExternalTimer):
        return backends
    racing = tuple(b for b in backends if external.races(b))
    if backends and not racing:
        reasons = "; ".join(external.races(b).reason for b in backends)
        raise InputError(f"--profiler {timer}: no backend of this run can race: {reasons}")
    return racing

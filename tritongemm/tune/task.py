"""The class `Task`, which is the state of one size in the pipeline. The main thread owns all tasks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from statistics import median

from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RESTED, RESTED_LIBRARY, RaceResult
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure import choose
from tritongemm.plugins.contracts import Search
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.roster import is_searched


class TaskState(Enum):
    """The stage that a size has reached in the pipeline."""

    QUEUED = "queued"  # it is not planned
    BUILDING = "building"  # the batch that its strategy asked for is compiled, and screened binary by binary
    SEARCHING = "searching"  # its strategy works out the next batch
    WAITING = "waiting"  # its strategy wants no more; slow compiles or a device still work on it
    RACING = "racing"  # its finalists are verified and raced, or queued for that
    DONE = "done"  # it has a record, or was compiled where no more was wanted
    FAILED = "failed"  # it can't be tuned; `Task.failure` says why


NEXT_STATES = {
    TaskState.QUEUED: {TaskState.BUILDING},
    TaskState.BUILDING: {TaskState.SEARCHING},
    TaskState.SEARCHING: {TaskState.BUILDING, TaskState.WAITING},
    TaskState.WAITING: {TaskState.RACING, TaskState.DONE},
    TaskState.RACING: {TaskState.DONE},
    TaskState.DONE: set(),
    TaskState.FAILED: set(),
}


class BestTime:
    """The shortest time of a size so far, in seconds; the only value of a task that its device's thread updates."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = inf

    def lower(self, seconds: float) -> None:
        """Update the shortest time."""
        self.seconds = min(self.seconds, seconds)


@dataclass(eq=False)
class Task:
    """The state of one size that is tuned."""

    problem: Problem  # the problem that is tuned
    state: TaskState = TaskState.QUEUED  # its stage; `move_to` changes it
    turn: int = 1  # its place in the order of the run, from 1
    # The strategy, which yields batches and is sent their trials; None until the problem has been planned.
    search: Search | None = None
    batch: list[Config] = field(default_factory=list)  # the strategy's last batch
    # Compile jobs of the batch's configs that another process has prepared, by config name.
    jobs: dict[str, CompileJob | Support] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)  # the outcome of every config so far, by config name
    artifacts: dict[str, Artifact] = field(default_factory=dict)  # compiled artifacts, by config name
    asked_others: bool = False  # other backends have been asked for their candidates
    unscreened: int = 0  # configs of the batch that have not been screened
    untried: int = 0  # configs that the search may still try
    in_flight: int = 0  # pieces of work that a device has not answered
    # Configs with slow background compiles, by name; only the race waits for them.
    slow: dict[str, Config] = field(default_factory=dict)
    best: BestTime = field(default_factory=BestTime)  # the shortest time so far
    failure: str = ""  # why the problem can't be tuned; "" while it can
    refused: dict[str, str] = field(default_factory=dict)  # backends without candidates, with the reasons

    @property
    def finished(self) -> bool:
        """Whether the task is done or has failed."""
        return self.state in (TaskState.DONE, TaskState.FAILED)

    def move_to(self, state: TaskState) -> None:
        """Change the state of the size."""
        if state is not TaskState.FAILED and state not in NEXT_STATES[self.state]:
            raise ValueError(f"{self.problem.key} can't go from {self.state.value} to {state.value}")
        self.state = state

    def fail(self, reason: str) -> None:
        """Record why it can't be tuned; only the first reason is kept."""
        self.failure = self.failure or reason

    def count_tried(self, count: int) -> int:
        """Count configs of the batch that are screened, or won't be; return how many the search counts."""
        self.unscreened -= count
        counted = min(count, self.untried)  # other backends' candidates come on top
        self.untried -= counted
        return counted

    def add_trial(self, trial: Trial) -> None:
        """Record the outcome of a config."""
        self.trials[trial.config.name] = trial
        if trial.status == "ok":
            self.best.lower(trial.seconds)


def list_without_kernels(tasks: Iterable[Task], options: TuningOptions) -> Iterator[str]:
    """Yield a line for each size at which libraries alone raced, as time was spent before a kernel was compiled."""
    if options.stop or not any(map(is_searched, options.backends)):
        return
    for task in (task for task in tasks if not task.failure and not any(a.digest for a in task.artifacts.values())):
        yield (
            f"{task.problem.key}: the {options.seconds:g} s of --budget were spent before a kernel of it was compiled, "
            "so that libraries alone have raced; a longer one, with --no_resume, has kernels race too"
        )


def make_record(
    problem: Problem,
    race: RaceResult,
    target: Target,
    options: TuningOptions,
    libraries: frozenset[str],
    verified: str,
    built: Iterable[Artifact] = (),
) -> Record:
    """Return the record of a final race."""
    library_entries = frozenset(t.config.name for t in race.trials if t.config.backend in libraries)
    baseline = race.samples.get(BASELINE_ENTRY)
    order = str(options.invariance.order(problem)) if options.invariance else ""
    rivals = {n: s for n, s in race.samples.items() if not (order and n == BASELINE_ENTRY)}  # whose order isn't known
    choice = choose.choose(rivals, options.margin, library_entries)
    best = next(t for t in race.trials if t.config.name == choice.name)
    beyond = f", {best.outside:.3%} of the elements beyond the tolerance" if best.outside else ""
    return Record(
        problem=problem,
        target=target.name,
        config=best.config,
        winner=options.library if choice.library_won else best.config.backend,
        seconds=best.seconds,
        spread=best.spread,
        timer=best.timer,
        error=best.error,
        tolerance=best.tolerance,
        library_seconds=median(baseline) if baseline else None,
        library=options.library if baseline or race.library_wrong else "",
        library_wrong=race.library_wrong,
        tie=choice.tie,
        verified=verified + beyond,
        toolchain=options.toolchain,
        cold=race.cold,
        compute_units=target.compute_units,
        quantize_seconds=race.quantize_seconds,
        order=order,
        row_bits=best.row_bits,
        notes=_rested(race, choice.name),
        code=next((artifact.sha256 for artifact in built if artifact.config == best.config), ""),
    )


def _rested(race: RaceResult, name: str) -> dict[str, float]:
    """Return what a record of sustained power says of times at full clock, in microseconds."""
    entries = {RESTED: name, RESTED_LIBRARY: BASELINE_ENTRY}
    return {key: median(race.rested[entry]) * 1e6 for key, entry in entries.items() if entry in race.rested}


def longest_first(problems: Iterable[Problem], target: Target) -> list[Problem]:
    """Sort problems in the order in which they begin: those that keep a device busy longest come first.

    A device times them while kernels for the others compile.
    """
    return sorted(problems, key=lambda p: target.roofline_seconds(p.flops, p.bytes, p.a.type), reverse=True)


def trials_of(task: Task, configs: Sequence[Config]) -> list[Trial]:
    """Return the trials of these configs of a task, in their order."""
    return [task.trials[c.name] for c in configs]


def why_nothing_was_compiled(task: Task) -> list[str]:
    """Say why no config of a task was compiled: which backends refused it, and how the first config failed."""
    outcomes: list[Artifact | Trial] = [*task.artifacts.values(), *task.trials.values()]
    failed = next((outcome for outcome in outcomes if outcome.reason), None)
    refused = [f"{name}: {reason}" for name, reason in task.refused.items()]
    first = [f"the first, {failed.config.name}: {failed.reason}"] if failed else []
    return ["no config could be compiled", *refused, *first]

"""The racing stage, which turns the screened trials of one problem, or tuned kernels, into the record of the winner."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, SearchedBackend
from tritongemm.tune import roster
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.quantization import with_quantization
from tritongemm.tune.roster import is_library, is_searched
from tritongemm.tune.search_processes import WinnerModule
from tritongemm.tune.task import Task, make_record

LIBRARY_PLACES = 20
# From this number of sizes per core at most six candidates of a size race: in 32 races the sixth of the screen was the
# last that won. 82 races of experts until they were decided took 41 s, where the screens of 168 sizes took 22.
CROWD_PER_CORE, FINALISTS_OF_CROWD = 8, 6
NEAR = 1.06  # of 736 races on H200s no winner had been screened more than 1.047 times the best


def pick_finalists(trials: Iterable[Trial], count: int) -> tuple[list[Trial], list[Trial]]:
    """Select the trials whose configs race first, and those that race next if all of the first are wrong.

    `count` places go to compiled kernels: the best of every backend gets one; a backend other than the searched one
    gets at most a quarter, and all of those together at most half. Libraries get additional places, each for its first
    choice and its best, up to `LIBRARY_PLACES`. Beyond a quarter of the places, only candidates that are `NEAR` the
    best of all race: verifying the others would take time for nothing.
    """
    passed = [t for t in trials if t.status == "ok"]
    ranked = sorted(passed, key=lambda t: (t.seconds, t.config))
    by_backend: dict[str, list[Trial]] = {}
    for trial in ranked:
        by_backend.setdefault(trial.config.backend, []).append(trial)
    own = [t for t in ranked if is_searched(t.config.backend)]
    by_backend = {n: found for n, found in by_backend.items() if not is_searched(n)}
    libraries = {n: by_backend.pop(n) for n in list(by_backend) if is_library(n)}
    share = max(1, count // 4)

    def hopeful(found: list[Trial], places: int) -> list[Trial]:
        near = sum(t.seconds <= NEAR * ranked[0].seconds for t in found)
        return found[: min(places, max(share, near))]

    invited = [(place, t.seconds, t) for found in by_backend.values() for place, t in enumerate(found[:share])]
    first = [t for *_, t in sorted(invited, key=lambda one: one[:2])[: max(len(by_backend), count // 2)]]
    reserved = share if libraries else 0
    first += hopeful(own, max(1, count - len(first) - reserved))
    for name, found in libraries.items():
        first += hopeful(found, LIBRARY_PLACES)
        favourite = next(t for t in passed if t.config.backend == name)
        first += [] if favourite in first else [favourite]
    first.sort(key=lambda t: (t.seconds, t.config))
    racing = {t.config for t in first}
    rest = [t for t in ranked if t.config not in racing]
    return first, sorted(rest, key=lambda t: not is_searched(t.config.backend))


@dataclass(frozen=True)
class RaceWork:
    """A race for a device to run."""

    problem: Problem  # the problem
    first: tuple[Artifact, ...]  # finalists, which race first
    reserve: tuple[Artifact, ...]  # the next candidates, which race if all finalists are wrong
    brief: bool = False  # whether the race ends after the fewest rounds


@dataclass(frozen=True)
class RaceOutcome:
    """The outcome of a race."""

    lost: tuple[Trial, ...]  # trials of earlier finalists, none of which passed verification
    result: RaceResult | None  # the race of the first finalists of which one passed; None if none did
    verified: str = ""  # how the results were verified, in words
    failure: str = ""  # why the race could not be finished; "" if it was
    library_wrong: str = ""  # why the baseline's result is wrong too, where none passed; "" if it is not


def prepare_race(task: Task, options: TuningOptions, target: Target, sizes_per_core: float) -> RaceWork:
    """Select the finalists of a size, and those in reserve, from its trials and compiled artifacts.

    Of many sizes per core fewer race, for the fewest rounds where no library does, of which a gain would be stated.
    """
    crowded, library = sizes_per_core >= CROWD_PER_CORE, options.library
    alone = not library or not registry.get(Backend, library).supports(task.problem, target)
    # A resumed run knows trials of what it has not built: the cache is gone, or time was up.
    built = {name: artifact for name, artifact in task.artifacts.items() if artifact.status == "ok"}
    known = [t for t in task.trials.values() if t.config.name in built]
    fewer = crowded and options.finalists == TuningOptions.finalists  # another number is one that was asked for
    first, reserve = pick_finalists(known, FINALISTS_OF_CROWD if fewer else options.finalists)
    return RaceWork(
        task.problem,
        tuple(built[t.config.name] for t in first),
        tuple(built[t.config.name] for t in reserve),
        brief=crowded and alone,
    )


def run_race(work: RaceWork, evaluator: Evaluator, options: TuningOptions) -> RaceOutcome:
    """Race on a device; if all finalists are wrong, the next in reserve take their places until one passes."""
    batch, waiting = work.first, work.reserve
    lost: list[Trial] = []
    library_wrong = ""
    while batch:
        try:
            result = options.compare(work.problem, evaluator.race(work.problem, batch, options.library, work.brief))
        except TritonGemmError as error:
            return RaceOutcome(tuple(lost), None, failure=str(error))
        entered = result.samples.keys() - {BASELINE_ENTRY}
        if entered:
            winner = min(entered, key=lambda name: median(result.samples[name]))
            config = next(t.config for t in result.trials if t.config.name == winner)
            result = with_quantization(result, work.problem, evaluator)
            return RaceOutcome(tuple(lost), result, evaluator.describe(work.problem, config))
        lost += result.trials
        library_wrong = result.library_wrong
        batch, waiting = waiting[: options.finalists], waiting[options.finalists :]
    return RaceOutcome(tuple(lost), None, library_wrong=library_wrong)


def decide(task: Task, outcome: RaceOutcome, target: Target, options: TuningOptions) -> Record | None:
    """Return the record of a race, or None if no candidate passed, in which case the task gets the reason."""
    if outcome.result is None:
        task.fail(outcome.failure or _why_none_passed(task, outcome, target, options))
        return None
    libraries = frozenset(n for n in options.backends if roster.is_library(n))
    built = task.artifacts.values()
    return make_record(task.problem, outcome.result, target, options, libraries, outcome.verified, built)


def best_kernel(record: Record, trials: Sequence[Trial], target: Target, options: TuningOptions) -> WinnerModule | None:
    """Return the fastest generated kernel of a race, whichever backend won; None without one."""
    searched = {n for n in options.backends if isinstance(registry.get(Backend, n), SearchedBackend)}
    searched_trials = [t for t in trials if t.samples and t.config.backend in searched]
    if not searched_trials:
        return None
    best = min(searched_trials, key=lambda t: t.seconds)
    mine = replace(record, config=best.config, seconds=best.seconds)
    return WinnerModule(best.config.backend, mine, target, options.folder.absolute())


def _why_none_passed(task: Task, outcome: RaceOutcome, target: Target, options: TuningOptions) -> str:
    trials = [*task.trials.values(), *outcome.lost]
    counts = Counter(t.status for t in trials)
    within = f" within {options.seconds:g} s" if options.seconds else ""
    reasons = [f"{n} {s}" for s, n in counts.items()] or [f"{', '.join(options.backends)} brought none{within}"]
    reasons += [f"{name}: {reason}" for name, reason in task.refused.items()]
    reasons += [f"{t.config.name}: {t.reason.removeprefix(f'{t.config.name} ')}" for t in trials if t.reason][:1]
    reasons += [f"{options.library} is wrong too: {outcome.library_wrong}"] if outcome.library_wrong else []
    hints = [] if trials or options.seconds else roster.suggest_backends(task.problem, target, options.backends)
    return "; ".join([f"no candidate passed: {', '.join(reasons)}", *hints])


def race_again(
    evaluator: Evaluator, problem: Problem, artifacts: Sequence[Artifact], options: TuningOptions
) -> Record | Support:
    """Race these kernels and the baseline, and return the result, or why there is none."""
    able = list({one.config: one for one in artifacts if one.status == "ok"}.values())
    if not able:
        return Support("; ".join(dict.fromkeys(f"{one.status}: {one.reason}" for one in artifacts)))
    race = evaluator.race(problem, able, options.library)
    entered = race.samples.keys() - {BASELINE_ENTRY}
    if not entered:
        reasons = dict.fromkeys(f"{trial.status}: {trial.reason}" for trial in race.trials if trial.reason)
        if race.library_wrong:
            reasons[f"{options.library} is wrong too: {race.library_wrong}"] = None
        return Support("; ".join(reasons) or "nothing raced")
    fastest = min(entered, key=lambda name: median(race.samples[name]))
    config = next(trial.config for trial in race.trials if trial.config.name == fastest)
    libraries = frozenset(filter(roster.is_library, {one.config.backend for one in able}))
    verified = evaluator.describe(problem, config)
    return make_record(problem, race, evaluator.target, options, libraries, verified, able)

"""Measures reference and tuned kernels in processes of their own that take turns.

A process measures one side of all products of its device, verifies each result against float64, and ends; then a new
one measures the other side. So neither has the other's caches, workspaces or clocks, and what drifts meets both. Every
trial is in a journal when it is known: a killed benchmark goes on from there.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tritongemm.build.prepare import or_refusal
from tritongemm.campaigns.campaign import OpenEvaluator
from tritongemm.campaigns.uplift import ComparedProduct
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.record import SCHEMA
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator
from tritongemm.results import journal
from tritongemm.tune.task import longest_first

TURNS = 3  # processes that measure each side


@dataclass(frozen=True)
class Contest:
    """One product of a campaign: what runs untuned, and the kernel that was found."""

    problem: Problem  # what both compute
    reference: Artifact  # the library's own choice, ready to run
    tuned: Artifact | None  # the kernel that won the tuning; None where that was the library's own choice
    count: float = 1.0  # calls in the log
    columns: tuple[tuple[str, str], ...] = ()  # what else the list of products says of it

    @property
    def sides(self) -> tuple[Artifact, ...]:
        """The two kernels to measure, in the order of the turns."""
        return (self.reference,) if self.tuned is None else (self.reference, self.tuned)


def describe_run(
    contests: Sequence[Contest], target: Target, toolchain: Mapping[str, str], protocol: MeasureProtocol, devices: int
) -> dict[str, Any]:
    """Return the header of a benchmark's journal: what must agree for it to go on."""
    names = [f"{c.problem.key} {side.config.name}" for c in contests for side in c.sides]
    compared = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    header = {"target": target.name, "toolchain": dict(toolchain), "schema": SCHEMA}
    return header | {"protocol": {**asdict(protocol), "compared": compared, "devices": devices, "turns": TURNS}}


class TrialLog:
    """The trials of a comparison, by which a killed one goes on; a log of another comparison is set aside."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._guard = threading.Lock()
        self._trials: dict[tuple[Problem, str], list[Trial]] = {}
        self._journal, lines = journal.resume(path, header)
        for line in lines:
            if line.kind == "trial":
                problem, trial = line.value
                taken = or_refusal(trial.read)
                if not isinstance(taken, Support):  # else it is measured again
                    self._keep(problem, taken)

    def add(self, problem: Problem, trial: Trial) -> None:
        """Store a trial, on disk when this returns."""
        with self._guard:
            self._journal.append([{"problem": problem.to_json(), "trial": trial.to_json()}])
            self._keep(problem, trial)

    def trials(self, problem: Problem, config: Config) -> list[Trial]:
        """Return the trials that processes made of one side of a product, in order."""
        with self._guard:
            return list(self._trials.get((problem, config.name), ()))

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _keep(self, problem: Problem, trial: Trial) -> None:
        self._trials.setdefault((problem, trial.config.name), []).append(trial)


@dataclass
class Comparison:
    """Measures contests on all devices."""

    log: TrialLog  # gets every trial
    openers: Sequence[OpenEvaluator]  # start a new process on each device
    say: Callable[[str], None]  # prints what is done
    # Why a side can't be measured now, which a later run may; by problem and config.
    faults: dict[tuple[Problem, str], str] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, contests: Sequence[Contest], target: Target) -> list[ComparedProduct]:
        """Measure both sides of all contests; one that can't be measured gets a reason, and the others go on."""
        by_problem = {contest.problem: contest for contest in contests}
        order = [by_problem[problem] for problem in longest_first(by_problem, target)]
        count = len(self.openers)
        with ThreadPoolExecutor(count) as threads:
            shares = [threads.submit(self._work, opener, order[i::count]) for i, opener in enumerate(self.openers)]
            try:
                for share in shares:
                    share.result()
            except BaseException:
                self._stopped.set()  # a device ends after its current race
                raise
        return [self._compared(contest) for contest in contests]

    def _work(self, opener: OpenEvaluator, contests: Sequence[Contest]) -> None:
        """Measure contests on one device: all references, then all tuned kernels, in each of `TURNS` turns."""
        for turn in range(TURNS):
            for side, name in enumerate(("reference", "tuned")):
                wanted = [
                    (c.problem, c.sides[side]) for c in contests
                    if len(c.sides) > side and self._is_due(c, c.sides[side], turn)
                ]  # fmt: skip
                if wanted and not self._stopped.is_set():
                    self._measure(opener, wanted)
                    self.say(f"benchmark: turn {turn + 1} of {TURNS}, {name}: {len(wanted)} GEMMs measured")

    def _is_due(self, contest: Contest, side: Artifact, turn: int) -> bool:
        """Return whether a side is to be measured in a turn: it was not yet, and nothing has failed of the product."""
        failed = any(
            trial.status != "ok" for one in contest.sides for trial in self.log.trials(contest.problem, one.config)
        )
        faulty = any((contest.problem, one.config.name) in self.faults for one in contest.sides)
        runs = all(one.status == "ok" for one in contest.sides)
        return runs and not failed and not faulty and len(self.log.trials(contest.problem, side.config)) <= turn

    def _measure(self, opener: OpenEvaluator, wanted: Sequence[tuple[Problem, Artifact]]) -> None:
        """Measure sides in a new process, and log the trial of each."""
        evaluator = opener()
        try:
            for problem, artifact in wanted:
                if self._stopped.is_set():
                    return
                trial = _race(evaluator, problem, artifact)
                if isinstance(trial, Support):
                    self.faults[problem, artifact.config.name] = trial.reason
                else:
                    self.log.add(problem, trial)
        finally:
            evaluator.close()

    def _compared(self, contest: Contest) -> ComparedProduct:
        """Return the measurements of both sides of a contest, and why it failed if it did."""
        tuned = contest.tuned or contest.reference
        taken = {side.config.name: self.log.trials(contest.problem, side.config) for side in contest.sides}
        trials = {name: [trial for trial in own if trial.status == "ok"] for name, own in taken.items()}
        reference, found = trials[contest.reference.config.name], trials[tuned.config.name]
        return ComparedProduct(
            contest.problem.key,
            contest.count,
            contest.reference.config.name,
            tuned.config.name,
            tuple(trial.samples for trial in reference),
            () if contest.tuned is None else tuple(trial.samples for trial in found),
            _largest(trial.error for trial in reference),
            _largest(trial.error for trial in found),
            next((trial.tolerance for trial in (*found, *reference)), None),
            self._failure(contest),
            contest.columns,
        )

    def _failure(self, contest: Contest) -> str:
        """Return why a contest has no outcome; "" where it has one."""
        for side in contest.sides:
            which = "the reference" if side is contest.reference else "the tuned kernel"
            if side.status != "ok":
                return f"{which}: {side.status}: {side.reason}"
            if (contest.problem, side.config.name) in self.faults:
                return f"{which}: {self.faults[contest.problem, side.config.name]}"
            bad = next((t for t in self.log.trials(contest.problem, side.config) if t.status != "ok"), None)
            if bad is not None:
                return f"{which}: {bad.status}: {bad.reason}"
        return ""


def _race(evaluator: Evaluator, problem: Problem, artifact: Artifact) -> Trial | Support:
    """Return the trial of one side alone, or why it has none that a later run should not repeat."""
    race = or_refusal(partial(evaluator.race, problem, [artifact], ""))
    if isinstance(race, Support):  # e.g. the GPU is gone
        return race
    (trial,) = race.trials
    return Support(f"{trial.status}: {trial.reason}") if trial.try_again else trial


def _largest(errors: Iterable[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return max(known) if known else None

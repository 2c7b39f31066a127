"""What the pipeline works on and with: tasks, the plan for all of them, and who judges and who watches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.core.tuning_options import TuningOptions
from tritongemm.measure import choose
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Evaluator, LibraryBackend, Search


@dataclass
class Task:
    """One problem on its way down the line.

    Attributes:
        problem, judge, module: what is tuned, by whom it is timed, and where its kernels are.
        search: the strategy, which yields batches and is sent their trials; None until the problem has been planned.
        batch: what it asked for last.
        trials, built: what became of every config so far, by name.
        asked: other backends have been asked for their candidates.
        waiting: configs that the next batch waits for.
        slow: configs that are compiled beside the line, for which only the final waits.
        more: whether the strategy asks for more, once the batch has been timed.
        failure: why the problem can't be tuned; "" while it can.
        refused: backends that brought nothing, and why.
    """

    problem: Problem
    judge: Evaluator
    module: Path
    search: Search | None = None
    batch: list[Config] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)
    built: dict[str, Artifact] = field(default_factory=dict)
    asked: bool = False
    waiting: int = 0
    slow: list[tuple[Config, Future[Artifact]]] = field(default_factory=list)
    more: Future[bool] | None = None
    failure: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return min((t.seconds for t in self.trials.values() if t.status == "ok"), default=float("inf"))

    def record(self, final: RaceResult, plan: TuningOptions) -> Record:
        """The result of the final race."""
        configs = [t.config for t in final.trials]
        libraries = {c.name for c in configs if isinstance(registry.get(Backend, c.backend), LibraryBackend)}
        choice = choose.choose(final.samples, plan.margin, libraries)
        best = next(t for t in final.trials if t.config.name == choice.name)
        library = final.samples.get(BASELINE_ENTRY)
        return Record(
            problem=self.problem,
            target=self.judge.target.name,
            config=best.config,
            winner=plan.library if choice.library_won else best.config.backend,
            seconds=best.seconds,
            spread=best.spread,
            timer=best.timer,
            error=best.error,
            tolerance=best.tolerance,
            library_seconds=median(library) if library else None,
            library=plan.library if library else "",
            tie=choice.tie,
            verified=self.judge.describe(self.problem, best.config)
            + (f", {best.outside:.3%} of the elements beyond the tolerance" if best.outside else ""),
            toolchain=plan.toolchain,
            cold=final.cold,
            compute_units=self.judge.target.compute_units,
        )


def longest_first(problems: Iterable[Problem], target: Target) -> list[Problem]:
    """Those that keep a device busy longest come first: it times them while kernels for the others compile."""

    def least_seconds(problem: Problem) -> float:
        return target.roofline_seconds(problem.flops, problem.bytes, problem.a)

    return sorted(problems, key=least_seconds, reverse=True)


def dealt(problems: Iterable[Problem], judges: Sequence[Evaluator], folder: Path) -> list[Task]:
    """Problems dealt out among judges."""
    return [Task(p, judges[i % len(judges)], folder) for i, p in enumerate(problems)]


def no_search() -> Search:
    """The search of a run that leaves Triton's space alone: one batch, empty."""
    yield []

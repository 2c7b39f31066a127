"""What the pipeline works on and with: tasks, the plan for all of them, and who judges and who watches."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import log2
from pathlib import Path
from statistics import median
from typing import Protocol, TypeAlias

from tritongemm import choose, prune
from tritongemm.config import Config
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.target import Target
from tritongemm.timing import Final
from tritongemm.trial import Built, Trial

Search: TypeAlias = "Generator[list[Config], list[Trial], None]"  # yields batches, and is sent their trials


class Judge(Protocol):
    """What times and verifies candidates: a GPU, or the stand-in for one."""

    target: Target

    def start(self) -> None: ...
    def screen(self, problem: Problem, built: Sequence[Built], best: float) -> Iterator[Trial]: ...
    def enumerate(self, problem: Problem, backend: str, most: int) -> list[Config]: ...
    def check(self, problem: Problem, built: Sequence[Built]) -> Iterator[Trial]: ...
    def final(self, problem: Problem, built: Sequence[Built], library: str) -> Final: ...
    def describe(self, problem: Problem, config: Config) -> str: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """What is told of the progress."""

    def planned(self, problem: Problem, total: int, pruned: prune.Pruned) -> None: ...
    def offered(self, problem: Problem, backend: str, count: int, why: str) -> None: ...
    def refused(self, problem: Problem, backend: str, reason: str) -> None: ...
    def stage(self, name: str, total: int) -> None: ...
    def step(self, name: str, count: int = 1) -> None: ...
    def trial(self, problem: Problem, trial: Trial) -> None: ...
    def failed(self, problem: Problem, reason: str) -> None: ...
    def compiled(self, builds: Mapping[Problem, Collection[Built]]) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What to do, beside the problems.

    Attributes:
        folder: where generated modules go.
        strategy: plug-in of strategies/.
        budget: most configs tried for one problem; 0 for no limit.
        seconds: after so long no strategy is asked for more, and what there is is raced; 0 for no limit.
        finalists: candidates verified and raced.
        library: plug-in of backends/ that is raced; "" for none.
        backends: plug-ins of backends/ whose candidates are tried.
        algorithms: most candidates screened of each library, 0 for all; the library's own best guesses come first.
        margin: relative gain below which the library is kept.
        stop: "" to tune, or the stage after which to stop: ``generate`` or ``compile``.
        toolchain: versions, for the records.
    """

    folder: Path
    strategy: str = "exhaustive"
    budget: int = 0
    seconds: float = 0.0
    finalists: int = 12
    library: str = "torch"
    backends: tuple[str, ...] = ("triton",)
    algorithms: int = 48
    margin: float = choose.MARGIN
    stop: str = ""
    toolchain: dict[str, str] = field(default_factory=dict, hash=False)


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
    judge: Judge
    module: Path
    search: Search | None = None
    batch: list[Config] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)
    built: dict[str, Built] = field(default_factory=dict)
    asked: bool = False
    waiting: int = 0
    slow: list[tuple[Config, Future[Built]]] = field(default_factory=list)
    more: Future[bool] | None = None
    failure: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return min((t.seconds for t in self.trials.values() if t.status == "ok"), default=float("inf"))

    def record(self, final: Final, plan: Plan) -> Record:
        """The result of the final race."""
        choice = choose.choose(final.samples, plan.margin)
        best = next(t for t in final.trials if t.config.name == choice.name)
        library = final.samples.get(choose.LIBRARY)
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
        )


def longest_first(problems: Iterable[Problem], target: Target) -> list[Problem]:
    """Those that keep a device busy longest come first: it times them while kernels for the others compile."""

    def least_seconds(problem: Problem) -> float:
        return target.roofline_seconds(problem.flops, problem.bytes, problem.a)

    return sorted(problems, key=least_seconds, reverse=True)


def dealt(problems: Iterable[Problem], judges: Sequence[Judge], folder: Path) -> list[Task]:
    """Problems dealt out among judges."""
    return [Task(p, judges[i % len(judges)], folder) for i, p in enumerate(problems)]


def no_search() -> Search:
    """The search of a run that leaves Triton's space alone: one batch, empty."""
    yield []


def nearest(problem: Problem, records: Iterable[Record], count: int = 3) -> list[Config]:
    """Winners of the solved problems that differ least in size, among those of equal dtypes and layouts."""

    def distance(other: Problem) -> float:
        pairs = ((problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return sum(abs(log2(a / b)) for a, b in pairs)

    alike = [r for r in records if (r.problem.dtypes, r.problem.layout) == (problem.dtypes, problem.layout)]
    return [r.config for r in sorted(alike, key=lambda r: distance(r.problem))[:count] if r.config.backend == "triton"]

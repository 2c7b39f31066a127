"""The contracts of search strategies, and of observers of a run's progress; the results of pruning and ranking."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.space import Space
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts.plugin import Plugin

Search: TypeAlias = Generator[list[Config], list[Trial], None]  # yields batches of configs, and is sent their trials


@dataclass(frozen=True)
class Pruned:
    """What pruning a search space left, and what it removed."""

    kept: tuple[Config, ...]  # survivors, in the order given; never empty unless nothing was given or the guard was off
    removed: dict[str, int]  # configs dropped by each rule, in the order of the rules
    reasons: dict[str, str]  # one example of each rule that dropped any: config name and reason
    skipped: tuple[str, ...] = ()  # rules that would have dropped every remaining config and were not applied


Floats = NDArray[np.float64]

TERMS = ("matrix", "lds", "l2", "llc", "hbm", "latency", "epilogue", "scratch", "reduce", "launch")


@dataclass(frozen=True)
class Prediction:
    """What the model expects of a config."""

    config: Config  # the candidate
    seconds: float  # predicted time of one launch
    terms: dict[str, float] = field(hash=False)  # seconds each resource would need by itself, by its name in `TERMS`


class Predictions(Sequence[Prediction]):
    """Predictions of many configs, kept as columns."""

    def __init__(self, configs: tuple[Config, ...], seconds: Floats, terms: Floats) -> None:
        self.configs, self.seconds, self.terms = configs, seconds, terms

    def select(self, configs: tuple[Config, ...]) -> Predictions:
        """Return the predictions of some of the configs, in the order given; each must be here."""
        if configs == self.configs:
            return self
        place = {c: i for i, c in enumerate(self.configs)}
        places = [place[c] for c in configs]
        return Predictions(configs, self.seconds[places], self.terms[places])

    def __len__(self) -> int:
        return len(self.configs)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Predictions: ...
    def __getitem__(self, index: int | slice) -> Prediction | Predictions:
        configs, seconds, terms = self.configs[index], self.seconds[index], self.terms[index]
        if isinstance(configs, tuple):
            return Predictions(configs, seconds, terms)
        return Prediction(configs, float(seconds), dict(zip(TERMS, terms.tolist(), strict=True)))


@dataclass(frozen=True)
class SearchPlan:
    """The input of a strategy."""

    space: Space  # the space in which neighbours are searched; names the problem and the target
    expected: Predictions  # kept configs with their predictions, the best first; at least one
    seeds: tuple[Config, ...] = ()  # winners of similar problems, to be tried first
    # Names of kernels that other problems of the run also request, which cost no compile.
    compiled: Collection[str] = field(default=frozenset())
    # Names of kernels that the run has compiled for problems which differ from this one in size only; they increase
    # while the search runs.
    built: Collection[str] = field(default=frozenset())
    population: int = 0  # configs of a generation, for a strategy that has generations; 0 for its default
    problems_per_core: float = 0.0  # problems of the run for each compiling core of one GPU; 0 if that is not known


class Strategy(Plugin, abstract=True):
    """A search over a problem's configs, which decides which are tried, and in which order."""

    package = "tritongemm.search.strategies"
    kind = "strategy"
    population: ClassVar[int] = 0  # default configs of a generation, for a search with generations; 0 if it has none
    # Whether another process may run the search, which is sent the kernels built meanwhile; False if it reads
    # `SearchPlan.compiled`.
    independent: ClassVar[bool] = False

    def most_configs(self, kept: int, budget: int, population: int) -> int:
        """Return how many of the `kept` configs that pruning left a search tries at most, beside kernels built already.

        `budget` and `population` are as of `search`.
        """
        return min(kept, budget or kept)

    @abstractmethod
    def search(self, plan: SearchPlan, budget: int) -> Search:
        """Return a generator that yields batches of configs and is sent their trials; it ends when it wants no more.

        It tries at most `budget` configs; 0 for the strategy's own number. The same plan and trials give the same
        batches, if the kernels built meanwhile are the same.
        """


class Watcher(Protocol):
    """An observer of the progress of a run."""

    verbose: bool  # what is left out is wanted too
    compilers: int  # processes that compile in a run that times nothing; else 0

    def say(self, text: str) -> None:
        """Report a line to the user."""

    def say_alike(self, lines: Iterable[str]) -> None:
        """Report messages about rows; those of one kind may become one line."""

    def planned(self, problem: Problem, total: int, kept: int, pruned: Pruned) -> None:
        """Report that `total` configs were pruned to `kept`; `pruned` counts them by rule, and may lack the configs."""

    def finished(self, record: Record | None) -> None:
        """Report that a size is done, with its record if tuning gave one."""

    def offered(self, problem: Problem, backend: str, count: int, why: str) -> None:
        """Report that a backend has `count` candidates; `why` is the reason if there are none."""

    def refused(self, problem: Problem, backend: str, reason: str) -> None:
        """Report that a backend can't compute the problem, or failed to list candidates."""

    def stage(self, name: str, total: int) -> None:
        """Report that a stage of `total` steps begins."""

    def step(self, name: str, count: int = 1) -> None:
        """Report that steps of a stage are done."""

    def trial(self, problem: Problem, trial: Trial) -> None:
        """Report that a candidate was timed, verified or refused."""

    def failed(self, problem: Problem, reason: str) -> None:
        """Report that the run has no result for the problem."""

    def compiled(self, builds: Mapping[Problem, Collection[Artifact]]) -> None:
        """Report that kernels were compiled, or could not be."""

"""Knowledge shared between the searches of a run: winners to try first, and kernels that are already compiled."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2
from typing import Protocol

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial

# The winners of this number of problems, the nearest in size, are tried first.
NEAREST_PROBLEMS = 3


class ResultsView(Protocol):
    """A read-only view of the results."""

    def records(self) -> Sequence[Record]:
        """Return the result of each problem that has been tuned."""

    def trials(self, problem: Problem) -> Mapping[tuple[str, str], Trial]:
        """Return the known trials of a problem's candidates, by config name and stage."""


class WarmStart:
    """The winners and compiled kernels of other problems, which a strategy uses.

    A resumed run, in which some problems already have a record, gets the same answers as the first run.
    """

    def __init__(self, turns: Sequence[Problem], results: ResultsView) -> None:
        self._turns, self._own, self._results = turns, frozenset(turns), results
        self._first_batches: dict[Problem, Sequence[Config]] = {}
        self._kernels: defaultdict[Problem, set[str]] = defaultdict(set)  # by what problems share
        self._passed = 0  # problems whose kernels are among these
        self._built: defaultdict[Problem, set[str]] = defaultdict(set)  # likewise

    def note_batch(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Record the configs that a problem of the run requests first."""
        self._first_batches[problem] = configs

    def note_built(self, problem: Problem, artifact: Artifact) -> None:
        """Record the outcome of a compile that a problem of the run requested."""
        if artifact.status == "ok":
            self._built[_without_size(problem)].add(artifact.config.kernel_name)

    def built_kernels(self, problem: Problem) -> Collection[str]:
        """Return the names of kernels compiled for problems that differ in size only, a set that grows."""
        return self._built[_without_size(problem)]

    def winners(self, problem: Problem, backend: str) -> list[Config]:
        """Return a backend's configs that won the problems nearest to this one.

        Winners of this run are left out, as a resumed run has some of them already.
        """
        return nearest_winners(problem, backend, [r for r in self._results.records() if r.problem not in self._own])

    def compiled_kernels(self, problem: Problem) -> Collection[str]:
        """Return the names of kernels requested by earlier problems of the run that differ in size only.

        Problems must be passed in the order of the run.
        """
        while (other := self._turns[self._passed]) != problem:
            known = (t.config for t in self._results.trials(other).values())
            self._kernels[_without_size(other)].update(c.kernel_name for c in self._first_batches.get(other, known))
            self._passed += 1
        return self._kernels[_without_size(problem)]


def _without_size(problem: Problem) -> Problem:
    return replace(problem.at(1), n=1, k=1)


def nearest_winners(problem: Problem, backend: str, records: Iterable[Record]) -> list[Config]:
    """Return the configs with which one backend won the solved problems nearest in size, of equal dtypes and layout."""

    def distance(other: Problem) -> float:
        pairs = ((problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return sum(abs(log2(a / b)) for a, b in pairs)

    comparable = [r for r in records if (r.problem.dtypes, r.problem.layout) == (problem.dtypes, problem.layout)]
    nearest = sorted(comparable, key=lambda r: distance(r.problem))[:NEAREST_PROBLEMS]
    return [r.config for r in nearest if r.config.backend == backend]

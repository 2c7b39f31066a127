"""What other problems of a run tell the search of one: winners to try first, and kernels that are compiled already."""

from __future__ import annotations

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

# The winners of so many problems, the nearest in size, are tried first.
NEAREST_PROBLEMS = 3


class ResultsView(Protocol):
    """The results that there are, to be read only."""

    def records(self) -> Sequence[Record]:
        """The result of each problem that has been tuned."""

    def trials(self, problem: Problem) -> Mapping[tuple[str, str], Trial]:
        """What is known of a problem's candidates, by config name and stage."""


class WarmStart:
    """What other problems tell a strategy: winners to try first, and kernels that are compiled whoever else tries them.

    It is told the same in a resumed run as in the first one, by which some problems of the run have a record.

    Args:
        turns: all problems of the run, in their order.
        results: the records, and what is known of the candidates of problems that have one.
    """

    def __init__(self, turns: Sequence[Problem], results: ResultsView) -> None:
        self._turns, self._own, self._results = turns, frozenset(turns), results
        self._first_batches: dict[Problem, Sequence[Config]] = {}
        self._kernels: defaultdict[Problem, set[str]] = defaultdict(set)  # by what problems have in common
        self._passed = 0  # problems whose kernels are among these
        self._built: defaultdict[Problem, set[str]] = defaultdict(set)  # likewise

    def note_batch(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Note which configs a problem of the run asks for first."""
        self._first_batches[problem] = configs

    def note_built(self, problem: Problem, artifact: Artifact) -> None:
        """Note what came of a compile that a problem of the run asked for."""
        if artifact.status == "ok":
            self._built[_without_size(problem)].add(artifact.config.kernel_name)

    def built_kernels(self, problem: Problem) -> Collection[str]:
        """Names of the kernels that problems of the run have had compiled, where they differ from this one in size
        alone: a set that grows with the run.
        """
        return self._built[_without_size(problem)]

    def winners(self, problem: Problem, backend: str) -> list[Config]:
        """Configs of a backend that won the problems nearest to one.

        This run's own are left out, for a resumed run has some of them already.
        """
        return nearest_winners(problem, backend, [r for r in self._results.records() if r.problem not in self._own])

    def compiled_kernels(self, problem: Problem) -> Collection[str]:
        """Names of the kernels that earlier problems of the run ask for, where they differ from this one in size alone.

        Problems must be given in the order of the run.
        """
        while (other := self._turns[self._passed]) != problem:
            known = (t.config for t in self._results.trials(other).values())
            self._kernels[_without_size(other)].update(c.kernel_name for c in self._first_batches.get(other, known))
            self._passed += 1
        return self._kernels[_without_size(problem)]


def _without_size(problem: Problem) -> Problem:
    return replace(problem.at(1), n=1, k=1)


def nearest_winners(problem: Problem, backend: str, records: Iterable[Record]) -> list[Config]:
    """The configs with which one backend won the solved problems nearest in size, of equal dtypes and layout.

    Args:
        problem: whose neighbours are looked for.
        backend: plug-in of backends/ whose winners are wanted.
        records: results of solved problems.
    """

    def distance(other: Problem) -> float:
        pairs = ((problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return sum(abs(log2(a / b)) for a, b in pairs)

    comparable = [r for r in records if (r.problem.dtypes, r.problem.layout) == (problem.dtypes, problem.layout)]
    nearest = sorted(comparable, key=lambda r: distance(r.problem))[:NEAREST_PROBLEMS]
    return [r.config for r in nearest if r.config.backend == backend]

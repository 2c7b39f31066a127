"""What other problems of a run tell the search of one: winners to try first, and kernels that are compiled already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import log2

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.results.store import Store


class WarmStart:
    """What other problems tell a strategy: winners to try first, and kernels that are compiled whoever else tries them.

    It is told the same in a resumed run as in the first one, by which some problems of the run have a record.

    Args:
        turns: all problems of the run, in their order.
        store: the records, and what is known of the candidates of problems that have one.
    """

    def __init__(self, turns: Sequence[Problem], store: Store) -> None:
        self._turns, self._own, self._store = turns, frozenset(turns), store
        self._asked: dict[Problem, Sequence[Config]] = {}
        self._kernels: defaultdict[Problem, set[str]] = defaultdict(set)  # by what problems have in common
        self._passed = 0  # problems whose kernels are among these

    def asked(self, problem: Problem, configs: Sequence[Config]) -> None:
        """A problem of the run asks for these first."""
        self._asked[problem] = configs

    def winners(self, problem: Problem) -> list[Config]:
        """Of the problems nearest to one, this run's own left out: a resumed one has some of them already."""
        return nearest(problem, [r for r in self._store.records() if r.problem not in self._own])

    def kernels(self, problem: Problem) -> Collection[str]:
        """Names of those that the problems before one ask for, where they differ from it in size alone; asked in turn."""
        while (other := self._turns[self._passed]) != problem:
            known = (t.config for t in self._store.trials(other).values())
            self._kernels[_kind(other)].update(c.kernel_name for c in self._asked.get(other, known))
            self._passed += 1
        return self._kernels[_kind(problem)]


def _kind(problem: Problem) -> Problem:
    return replace(problem, m=1, n=1, k=1)


def nearest(problem: Problem, records: Iterable[Record], count: int = 3) -> list[Config]:
    """Winners of the solved problems that differ least in size, among those of equal dtypes and layouts."""

    def distance(other: Problem) -> float:
        pairs = ((problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return sum(abs(log2(a / b)) for a, b in pairs)

    alike = [r for r in records if (r.problem.dtypes, r.problem.layout) == (problem.dtypes, problem.layout)]
    return [r.config for r in sorted(alike, key=lambda r: distance(r.problem))[:count] if r.config.backend == "triton"]

"""Measures how busy each device was, by an evaluator that counts the seconds of another one."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator


class CountedEvaluator(Evaluator):
    """An evaluator whose work is counted; one thread works with it at a time."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self.target, self.times_quantization = evaluator.target, evaluator.times_quantization
        self.busy_seconds = 0.0  # in which it did any work
        self.raced: set[Problem] = set()  # whose final race it held

    @contextmanager
    def _counting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.busy_seconds += time.perf_counter() - started

    def start(self) -> None:
        """Begin to start the evaluator's process."""
        self._evaluator.start()

    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """Yield a cheap time for each candidate, as they come."""
        with self._counting():
            yield from self._evaluator.screen(problem, artifacts, best_s)

    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """Yield the trial of each candidate, with its error."""
        with self._counting():
            yield from self._evaluator.verify(problem, artifacts)

    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates and race those that pass."""
        with self._counting():
            self.raced.add(problem)
            return self._evaluator.race(problem, artifacts, baseline, brief)

    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """Return the configs that a library has for a problem."""
        with self._counting():
            return self._evaluator.list_algorithms(problem, backend, limit)

    def describe(self, problem: Problem, config: Config) -> str:
        """Return a short description of how a result is verified."""
        return self._evaluator.describe(problem, config)

    def time_quantization(self, problem: Problem, launches: Any) -> float | None:
        """Return the seconds of the kernels that quantise A; None where they can't be measured."""
        with self._counting():
            return self._evaluator.time_quantization(problem, launches)

    def close(self) -> None:
        """Give the device back."""
        self._evaluator.close()


def describe_loads(devices: Sequence[int], evaluators: Sequence[Evaluator], seconds: float) -> list[str]:
    """Return a line for each device: how long it worked, of how many seconds, and how many races it ran."""
    lines = []
    for device, evaluator in zip(devices, evaluators, strict=False):
        if isinstance(evaluator, CountedEvaluator):
            share = 100 * evaluator.busy_seconds / seconds if seconds else 0.0
            lines.append(
                f"device {device}: busy {evaluator.busy_seconds:.1f} of {seconds:.1f} s ({share:.0f} %), "
                f"{len(evaluator.raced)} final races"
            )
    return lines

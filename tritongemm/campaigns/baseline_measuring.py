"""Stage: problems → seconds of the baseline's own choice, on all devices at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import median

from tritongemm.campaigns.baseline_times import BaselineTimes
from tritongemm.core.errors import OutputError, TargetError, TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Evaluator

_ATTEMPTS = 2  # A problem that fails on a device is measured again when all others are done.
_MOST_FAILURES = 2  # A device that fails so often in a row is given up while there is another.


class _FreeDevices:
    """Evaluators that wait for work; threads take one each.

    Args:
        evaluators: one for each device.
        say: told which is given up.
    """

    def __init__(self, evaluators: Sequence[Evaluator], say: Callable[[str], None]) -> None:
        self._free: SimpleQueue[int] = SimpleQueue()
        self._evaluators, self._say = evaluators, say
        self._failures, self._working = [0] * len(evaluators), len(evaluators)
        self._guard = threading.Lock()
        for number in range(len(evaluators)):
            self._free.put(number)

    def take(self) -> tuple[int, Evaluator]:
        """A device that is free, once one is: its number here, and its evaluator."""
        number = self._free.get()
        return number, self._evaluators[number]

    def give_back(self, number: int, failure: str) -> None:
        """A device has done its work, or failed; the last one that works is never given up."""
        with self._guard:
            self._failures[number] = self._failures[number] + 1 if failure else 0
            if self._failures[number] >= _MOST_FAILURES and self._working > 1:
                self._working -= 1
                self._say(f"the device at place {number} of those named is given up: {failure}")
                return
        self._free.put(number)


def measure_baselines(
    evaluators: Sequence[Evaluator], problems: Sequence[Problem], known: BaselineTimes, say: Callable[[str], None]
) -> None:
    """Measure problems on whichever device is free; each time is kept when it is known.

    Args:
        evaluators: one for each device.
        problems: each once.
        known: where times go.
        say: told what can't be measured.

    Raises:
        OutputError: a time can't be kept.
        TargetError: every measurement failed.
    """
    devices, failures = _FreeDevices(evaluators, say), dict[Problem, str]()
    baseline = registry.baseline().name

    def measure(problem: Problem) -> None:
        number, evaluator = devices.take()
        failure = ""
        try:
            samples = evaluator.race(problem, [], baseline).samples.get(BASELINE_ENTRY)
            if samples:
                known.add(problem.key, median(samples))
            else:
                say(f"{problem.key}: {baseline} does not compute it; the cost model says what it takes")
            failures.pop(problem, None)
        except OutputError:
            raise
        except TritonGemmError as error:
            failures[problem] = failure = str(error)
        finally:
            devices.give_back(number, failure)

    for _ in range(_ATTEMPTS):
        with ThreadPoolExecutor(len(evaluators)) as threads:
            for _ in threads.map(measure, list(failures) or problems):
                pass
        if not failures:
            return
    if len(failures) == len(problems):
        raise TargetError(f"no baseline could be measured; the first: {next(iter(failures.values()))}")
    for problem, reason in failures.items():
        say(f"{problem.key}: its baseline can't be measured, and the cost model says what it takes: {reason}")

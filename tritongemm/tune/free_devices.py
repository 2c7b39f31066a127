"""Distribution of independent work over several devices, each of which takes the next item when it is free."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from tritongemm.core.errors import OutputError, TritonGemmError
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import Evaluator

T = TypeVar("T")
R = TypeVar("R")

_MOST_FAILURES = 2  # failures in a row after which a device is given up while there is another


@dataclass(frozen=True)
class _Failed:
    """A device failed at an item."""

    reason: str


class _FreeDevices:
    """Evaluators that wait for work; threads take one each."""

    def __init__(self, evaluators: Sequence[Evaluator], say: Callable[[str], None]) -> None:
        self._free: SimpleQueue[int] = SimpleQueue()
        self._evaluators, self._say = evaluators, say
        self._failures, self._working = [0] * len(evaluators), len(evaluators)
        self._guard = threading.Lock()
        for number in range(len(evaluators)):
            self._free.put(number)

    def take(self) -> tuple[int, Evaluator]:
        """Return a free device, once there is one: its number here, and its evaluator."""
        number = self._free.get()
        return number, self._evaluators[number]

    def give_back(self, number: int, failure: str) -> None:
        """Return a device after its work or a failure; the last one that works is never given up."""
        with self._guard:
            self._failures[number] = self._failures[number] + 1 if failure else 0
            if self._failures[number] >= _MOST_FAILURES and self._working > 1:
                self._working -= 1
                self._say(f"the device at place {number} of those named is given up: {failure}")
                return
        self._free.put(number)


def work_when_free(
    evaluators: Sequence[Evaluator], things: Sequence[T], work: Callable[[Evaluator, T], R], say: Callable[[str], None]
) -> Generator[tuple[T, R | Support], None, None]:
    """Yield each item with the result of one device's `work`, in a thread, or why no device could produce one.

    Items are yielded as soon as they are done, so that a caller that stores them loses only the work in progress. Items
    on which a device failed, with a TritonGemmError, are tried once more after all others, and come last. `say` is
    called with a line about each device that is given up.
    """
    devices = _FreeDevices(evaluators, say)

    def attempt(thing: T) -> R | _Failed:
        number, evaluator = devices.take()
        failure = ""
        try:
            return work(evaluator, thing)
        except OutputError:
            raise
        except TritonGemmError as error:
            failure = str(error)
            return _Failed(failure)
        finally:
            devices.give_back(number, failure)

    def attempts(wanted: Sequence[T]) -> Iterator[tuple[T, R | _Failed]]:
        done: SimpleQueue[Future[R | _Failed]] = SimpleQueue()
        of = {threads.submit(attempt, thing): thing for thing in wanted}
        for future in of:
            future.add_done_callback(done.put)  # in the order in which they are done
        for _ in of:
            ended = done.get()
            yield of[ended], ended.result()

    again: list[T] = []
    threads = ThreadPoolExecutor(len(evaluators))
    try:
        for thing, made in attempts(things):
            if isinstance(made, _Failed):
                again.append(thing)
            else:
                yield thing, made
        for thing, made in attempts(again):
            yield thing, Support(made.reason) if isinstance(made, _Failed) else made
    finally:
        threads.shutdown(cancel_futures=True)  # a stop waits for what devices do now, and for nothing else

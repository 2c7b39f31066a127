"""The threads of planners, builders and strategies, and the events that they send to the owner of the tasks."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import OutputError, TritonGemmError
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator, Search
from tritongemm.tune.device_queue import DeviceQueue
from tritongemm.tune.final_race import RaceOutcome, RaceWork, run_race
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.planning import PlannedTasks
from tritongemm.tune.search_processes import PlannedSearch
from tritongemm.tune.task import Task


@dataclass(frozen=True)
class SizePlanned:
    """A size was planned: the configs that may be tried, in order; None if no backend has a search space."""

    task: Task
    plan: PlannedSearch | None


@dataclass(frozen=True)
class ArtifactBuilt:
    """A kernel was compiled, or found in the cache."""

    artifact: Artifact


@dataclass(frozen=True)
class SlowArtifactBuilt:
    """A slow background compile has finished."""

    task: Task
    artifact: Artifact


@dataclass(frozen=True)
class BuildsEnded:
    """No more artifacts will come."""


@dataclass(frozen=True)
class BatchChosen:
    """A strategy has chosen its next batch; None if it wants no more."""

    task: Task
    batch: list[Config] | None


@dataclass(frozen=True)
class Screened:
    """A device has screened artifacts of a size; `failure` says why it can't continue with the size."""

    task: Task
    batch_pieces: int
    other_pieces: int
    trials: tuple[Trial, ...]
    failure: str = ""


@dataclass(frozen=True)
class AlgorithmsListed:
    """A library has listed its algorithms; `refusal` says why it can't."""

    task: Task
    backend: str
    configs: tuple[Config, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Raced:
    """The final race of a size has finished."""

    task: Task
    outcome: RaceOutcome


@dataclass(frozen=True)
class ThreadFailed:
    """A thread has met an error that ends the run."""

    error: BaseException


Event: TypeAlias = (
    SizePlanned
    | ArtifactBuilt
    | SlowArtifactBuilt
    | BuildsEnded
    | BatchChosen
    | Screened
    | AlgorithmsListed
    | Raced
    | ThreadFailed
)


Send: TypeAlias = Callable[[Event], None]


def send_plans(send: Send, planned: PlannedTasks, over: threading.Event) -> None:
    """Report each task as it is planned, until the run is over."""
    try:
        with closing(planned):
            for task, plan in planned:
                if over.is_set():
                    return
                send(SizePlanned(task, plan))
    except BaseException as error:
        send(ThreadFailed(error))


def send_builds(send: Send, built: Generator[Artifact, None, None], over: threading.Event) -> None:
    """Report each artifact as it is built, and the end; once the run is over no further build begins."""
    try:
        with closing(built):
            for artifact in built:
                if over.is_set():
                    return
                send(ArtifactBuilt(artifact))
    except BaseException as error:
        send(ThreadFailed(error))
    else:
        send(BuildsEnded())


def send_slow_build(send: Send, task: Task, config: Config, future: Future[Artifact]) -> None:
    """Report one background compile, unless it was given up."""
    if future.cancelled():
        return
    error = future.exception()
    if error is not None:
        send(ThreadFailed(error))
    else:
        send(SlowArtifactBuilt(task, replace(future.result(), config=config)))


def choose_batch(send: Send, task: Task, search: Search, trials: list[Trial]) -> None:
    """Send a strategy the trials of its last batch, and report its next batch."""
    try:
        send(BatchChosen(task, search.send(trials)))
    except StopIteration:
        send(BatchChosen(task, None))
    except BaseException as error:
        send(ThreadFailed(error))


@dataclass(frozen=True)
class ScreenWork:
    """An artifact to screen; `in_batch` says that the strategy waits for it."""

    artifact: Artifact
    in_batch: bool


@dataclass(frozen=True)
class AlgorithmsWork:
    """A query for a library's algorithms."""

    backend: str


Work: TypeAlias = ScreenWork | AlgorithmsWork | RaceWork


class DeviceThread:
    """The thread of one device."""

    def __init__(
        self,
        device: int,
        evaluator: Evaluator,
        queue: DeviceQueue[Task, Work],
        options: TuningOptions,
        post: Callable[[Event], None],
        screened: Callable[[], None],
    ) -> None:
        self.device, self.evaluator, self.queue, self.options = device, evaluator, queue, options
        self._post, self._screened = post, screened

    def run(self) -> None:
        """Work until the queue is closed; an error that no size caused ends the run."""
        try:
            while (drawn := self.queue.draw(self.device)) is not None:
                task, works = drawn
                screens = [w for w in works if isinstance(w, ScreenWork)]
                for work in works:
                    if isinstance(work, AlgorithmsWork):
                        self._post(self._list_algorithms(task, work.backend))
                    elif isinstance(work, RaceWork):
                        self._post(Raced(task, run_race(work, self.evaluator, self.options)))
                if screens:
                    self._post(self._screen(task, screens))
        except BaseException as error:
            self._post(ThreadFailed(error))

    def _list_algorithms(self, task: Task, backend: str) -> AlgorithmsListed:
        try:
            configs = self.evaluator.list_algorithms(task.problem, backend, self.options.algorithms)
        except TritonGemmError as error:
            return AlgorithmsListed(task, backend, (), str(error))
        raced = (c for c in configs if self.options.may_race(c, task.problem, self.evaluator.target))
        return AlgorithmsListed(task, backend, tuple(raced))

    def _screen(self, task: Task, works: list[ScreenWork]) -> Screened:
        trials: list[Trial] = []
        failure = ""
        try:
            artifacts = [work.artifact for work in works]
            for trial in self.evaluator.screen(task.problem, artifacts, task.best.seconds):
                trials.append(trial)
                if trial.status == "ok":
                    task.best.lower(trial.seconds)
                self._screened()
        except OutputError:
            raise
        except TritonGemmError as error:
            failure = str(error)
        in_batch = sum(work.in_batch for work in works)
        return Screened(task, in_batch, len(works) - in_batch, tuple(trials), failure)

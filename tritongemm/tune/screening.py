"""The thread of one device, which draws work, screens kernels, queries libraries, races, and reports the outcome."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import OutputError, TritonGemmError
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Evaluator
from tritongemm.tune.device_queue import DeviceQueue
from tritongemm.tune.events import AlgorithmsListed, Event, Raced, Screened, ThreadFailed
from tritongemm.tune.final_race import RaceWork, run_race
from tritongemm.tune.options import TuningOptions
from tritongemm.tune.task import Task


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

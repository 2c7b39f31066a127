"""The thread functions of planners, builders and strategies, which send their results to the owner of the tasks."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Search
from tritongemm.tune.events import (
    ArtifactBuilt,
    BatchChosen,
    BuildsEnded,
    Event,
    SizePlanned,
    SlowArtifactBuilt,
    ThreadFailed,
)
from tritongemm.tune.planning import PlannedTasks
from tritongemm.tune.task import Task

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

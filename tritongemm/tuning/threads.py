"""What builders and strategies do in their threads: each function tells the owner of the tasks what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts import Search
from tritongemm.tuning.events import ArtifactBuilt, BatchChosen, BuildsEnded, Event, SlowArtifactBuilt, ThreadFailed
from tritongemm.tuning.task import Task

Tell: TypeAlias = Callable[[Event], None]


def tell_builds(tell: Tell, built: Iterable[Artifact]) -> None:
    """Tell of each artifact as it is built, and of the end."""
    try:
        for artifact in built:
            tell(ArtifactBuilt(artifact))
    except BaseException as error:
        tell(ThreadFailed(error))
    else:
        tell(BuildsEnded())


def tell_slow_build(tell: Tell, task: Task, config: Config, future: Future[Artifact]) -> None:
    """Tell of one compile in the background, unless it was given up."""
    if future.cancelled():
        return
    error = future.exception()
    if error is not None:
        tell(ThreadFailed(error))
    else:
        tell(SlowArtifactBuilt(task, replace(future.result(), config=config)))


def choose_batch(tell: Tell, task: Task, search: Search, trials: list[Trial]) -> None:
    """Tell what a strategy asks for next, now that it knows the trials of its last batch."""
    try:
        tell(BatchChosen(task, search.send(trials)))
    except StopIteration:
        tell(BatchChosen(task, None))
    except BaseException as error:
        tell(ThreadFailed(error))

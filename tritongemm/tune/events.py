"""The events that worker threads send to the main thread, which owns all tasks."""

from dataclasses import dataclass
from typing import TypeAlias

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.trial import Trial
from tritongemm.tune.final_race import RaceOutcome
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

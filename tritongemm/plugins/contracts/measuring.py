"""The contracts of clocks, and of what times and verifies candidates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import RaceResult
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial
from tritongemm.plugins.contracts.plugin import Plugin


class Clock(Protocol):
    """A timer made ready on a device."""

    def time(self, graph: Any, launches: int, symbol: str = "") -> float:
        """Seconds of one launch, from a replay of a captured graph of so many.

        Args:
            graph: the captured launches.
            launches: how many.
            symbol: the kernel that each launches; "" for any.
        """


class Timer(Plugin, abstract=True):
    """A clock that takes the times of kernels on a device.

    Attributes:
        label: what results say of it.
        vendor: whose GPUs it reads; "" for any.
        screens_with: another timer that screens in its place; "" for itself.
        counts_gaps: the time from one launch to the next counts, so a lead-in kernel runs before each sample.
    """

    package = "tritongemm.measure.timers"
    kind = "timer"
    label: ClassVar[str]
    vendor: ClassVar[str] = ""
    screens_with: ClassVar[str] = ""
    counts_gaps: ClassVar[bool] = False

    def prepare(self) -> None:
        """Register with the profiler, before the process first uses its GPU."""

    @abstractmethod
    def clock(self, device: Any, stream: int) -> Clock:
        """The clock on a driver's device, for graphs that run on a stream's handle."""


@dataclass(frozen=True)
class ExternalRaceJob:
    """A race that a profiler runs in a process of its own.

    Attributes:
        problem, target: what and where.
        configs: verified finalists.
        baseline: plug-in of backends/ that races with them; "" for none.
        device: ordinal.
        rotating_mb: MB that the operands rotate through.
        warmup, iters: launches of each, untimed and timed.
        timeout_s: seconds the tool may take.
    """

    problem: Problem
    target: Target
    configs: tuple[Config, ...]
    baseline: str
    device: int
    rotating_mb: int
    warmup: int
    iters: int
    timeout_s: float


class ExternalTimer(Timer, abstract=True):
    """A clock that runs the final race in a process of its own; another timer, `screens_with`, screens."""

    @final
    def clock(self, device: Any, stream: int) -> Clock:
        """Refuse to time single graphs.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.name} times whole races in a process of its own; {self.screens_with} times graphs")

    @abstractmethod
    def race(self, job: ExternalRaceJob) -> dict[str, list[float]]:
        """Seconds of each launch by config name, the baseline's under `core.trial.BASELINE_ENTRY`."""

    def races(self, backend: str) -> Support:
        """Whether kernels of a backend can take part."""
        return SUPPORTED


class Evaluator(ABC):
    """What times and verifies candidates: a GPU, or what stands in for one.

    Attributes:
        target: facts of the device.
        times_quantization: whether `time_quantization` measures anything.
    """

    target: Target
    times_quantization: bool = False

    @abstractmethod
    def start(self) -> None:
        """Begin to start; it may take seconds, in which problems can be planned."""

    @abstractmethod
    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """A cheap time for each candidate, as they come; `best_s`: seconds of the best so far."""

    @abstractmethod
    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """The error of each candidate."""

    @abstractmethod
    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates and race those that pass with a baseline backend ("" for none), briefly where asked."""

    @abstractmethod
    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """The configs that a library has for a problem, `limit` of them unless that is 0."""

    @abstractmethod
    def describe(self, problem: Problem, config: Config) -> str:
        """How a result is verified, in a few words."""

    def time_quantization(self, problem: Problem, launches: tuple[Launch, ...]) -> float | None:
        """Seconds of the kernels that quantise A, in order; None where they can't be measured."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the device back."""

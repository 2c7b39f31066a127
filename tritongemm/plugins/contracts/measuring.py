"""The contracts of timers and evaluators, which time and verify candidates."""

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
    """A timer prepared on a device."""

    def time(self, graph: Any, launches: int, symbol: str = "") -> float:
        """Return seconds of one launch, from a replay of a captured graph of `launches` of them.

        `symbol` is the kernel that each launches; "" for any.
        """


class Timer(Plugin, abstract=True):
    """A plug-in that measures the times of kernels on a device."""

    package = "tritongemm.measure.timers"
    kind = "timer"
    label: ClassVar[str]  # its name in results
    vendor: ClassVar[str] = ""  # the vendor whose GPUs it supports; "" for any
    screens_with: ClassVar[str] = ""  # another timer that screens in its place; "" for itself
    # Whether its times include the gaps between launches, so that a lead-in kernel runs before each sample.
    counts_gaps: ClassVar[bool] = False

    def prepare(self) -> None:
        """Register with the profiler, before the process first uses its GPU."""

    @abstractmethod
    def clock(self, device: Any, stream: int) -> Clock:
        """Return the clock on a driver's device, for graphs that run on the stream with this handle."""


@dataclass(frozen=True)
class ExternalRaceJob:
    """A race that a profiler runs in a process of its own."""

    # problem, target: the problem, and the GPU's facts
    problem: Problem
    target: Target
    configs: tuple[Config, ...]  # verified finalists
    baseline: str  # plug-in of backends/ that races with them; "" for none
    device: int  # ordinal
    rotating_mb: int  # MB that the operands rotate through
    # warmup, iters: launches of each, untimed and timed
    warmup: int
    iters: int
    timeout_s: float  # seconds the tool may take


class ExternalTimer(Timer, abstract=True):
    """A timer that runs the final race in a process of its own; another timer, `screens_with`, screens."""

    @final
    def clock(self, device: Any, stream: int) -> Clock:
        """Refuse to time single graphs. Raises InputError: always."""
        raise InputError(f"{self.name} times entire races in a process of its own; {self.screens_with} times graphs")

    @abstractmethod
    def race(self, job: ExternalRaceJob) -> dict[str, list[float]]:
        """Return seconds of each launch by config name, the baseline's under `core.trial.BASELINE_ENTRY`."""

    def races(self, backend: str) -> Support:
        """Say whether kernels of a backend can take part."""
        return SUPPORTED


class Evaluator(ABC):
    """Times and verifies candidates, on a GPU or on a stand-in for one."""

    target: Target  # facts of the device
    verification: ClassVar[str]  # what `verify` does, and what it can't find, in words
    times_quantization: bool = False  # whether `time_quantization` measures anything

    @abstractmethod
    def start(self) -> None:
        """Begin to start; it may take seconds, in which problems can be planned."""

    @abstractmethod
    def screen(self, problem: Problem, artifacts: Sequence[Artifact], best_s: float) -> Iterator[Trial]:
        """Yield a quick time of each candidate, as they come; `best_s` is the best time so far in seconds."""

    @abstractmethod
    def verify(self, problem: Problem, artifacts: Sequence[Artifact]) -> Iterator[Trial]:
        """Yield the error of each candidate."""

    @abstractmethod
    def race(self, problem: Problem, artifacts: Sequence[Artifact], baseline: str, brief: bool = False) -> RaceResult:
        """Verify candidates and race those that pass against a baseline backend ("" for none), briefly if asked."""

    @abstractmethod
    def list_algorithms(self, problem: Problem, backend: str, limit: int) -> list[Config]:
        """Return the configs that a library has for a problem, at most `limit` unless that is 0."""

    @abstractmethod
    def describe(self, problem: Problem, config: Config) -> str:
        """Describe in a few words how a result is verified."""

    def time_quantization(self, problem: Problem, launches: tuple[Launch, ...]) -> float | None:
        """Return seconds of the kernels that quantise A, in order; None if they can't be measured."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the device."""

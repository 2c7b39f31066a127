"""Messages to the process that measures on a GPU, and its answers.

A job is answered with `OperandsReady` first. Then come a `Trial` for each candidate of a `ScreenJob`, `VerifyJob` or
`RaceJob`, in their order; a race goes on with `NowRacing` and ends with `RaceSamples`, as a `QuantizeJob` does; an
`AlgorithmsJob` ends with `Algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tritongemm.core.config import Config
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.target import Target
from tritongemm.core.trial import Trial

QUANTIZATION = "quantize"  # the name of the samples of a `QuantizeJob`


@dataclass(frozen=True)
class MeasureSetup:
    """What is measured, how and on which device.

    Attributes:
        problem: whose operands are made.
        target: facts of the device.
        protocol: how times are taken.
        vendor: whose driver is used.
        device: ordinal of the device.
    """

    problem: Problem
    target: Target
    protocol: MeasureProtocol
    vendor: str
    device: int


@dataclass(frozen=True)
class LaunchCandidate:
    """A candidate as it is sent to the device.

    Attributes:
        config: the candidate.
        launch: its kernel's launch; None where a library launches its algorithm itself.
    """

    config: Config
    launch: Launch | HostLaunch | None


@dataclass(frozen=True)
class ScreenJob:
    """Take a cheap time of each candidate.

    Attributes:
        setup: what is measured and where.
        candidates: in the order they are timed.
        best_s: seconds of the best screened so far; a candidate twice as slow is not measured further.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    best_s: float


@dataclass(frozen=True)
class VerifyJob:
    """Compare the result of each candidate with the reference.

    Attributes:
        setup: what is computed and where.
        candidates: in the order they are verified.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]


@dataclass(frozen=True)
class RaceJob:
    """Verify each candidate, then race those that pass.

    Attributes:
        setup: what is measured and where.
        candidates: in the order they are verified.
        baseline: backend whose own choice races with them; "" for none.
        names_runners: `NowRacing` precedes each sample of the rounds, not only each warm-up.
        brief: the race ends after the fewest rounds, decided or not, and who is clearly slower leaves it after two.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    baseline: str
    names_runners: bool = False
    brief: bool = False


@dataclass(frozen=True)
class AlgorithmsJob:
    """List the algorithms that a library has.

    Attributes:
        setup: for which problem and where.
        backend: the library's backend.
        limit: most algorithms listed; 0 for all.
    """

    setup: MeasureSetup
    backend: str
    limit: int


@dataclass(frozen=True)
class QuantizeJob:
    """Time the kernels that quantise A, on activations of their own; its samples are those of a race of one.

    Attributes:
        setup: of which problem and where; how times are taken.
        launches: of the kernels in order, which read ``x`` of bf16 and write ``q`` and ``scale``; ``part`` is between.
    """

    setup: MeasureSetup
    launches: tuple[Launch, ...]


MeasureJob: TypeAlias = "ScreenJob | VerifyJob | RaceJob | AlgorithmsJob | QuantizeJob"


@dataclass(frozen=True)
class OperandsReady:
    """The operands are on the device.

    Attributes:
        copies: number of sets of operands.
        cold: all sets together are larger than the last-level cache.
    """

    copies: int
    cold: bool


@dataclass(frozen=True)
class NowRacing:
    """An entry of the race runs from now on.

    Attributes:
        name: of its config, or `core.trial.BASELINE_ENTRY`; "" where the entries take turns unannounced.
    """

    name: str


@dataclass(frozen=True)
class RaceSamples:
    """What a race gave.

    Attributes:
        samples: seconds of one launch, by the name of the config or `core.trial.BASELINE_ENTRY`.
    """

    samples: Mapping[str, Sequence[float]] = field(hash=False)


@dataclass(frozen=True)
class Algorithms:
    """What a library has.

    Attributes:
        configs: an algorithm each, the library's best guess first.
    """

    configs: tuple[Config, ...]


MeasureAnswer: TypeAlias = "OperandsReady | Trial | NowRacing | RaceSamples | Algorithms"

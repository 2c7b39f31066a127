"""The messages to the process that measures on a GPU, and its answers.

The first answer to a job is `OperandsReady`. Then come a `Trial` for each candidate of a `ScreenJob`, `VerifyJob` or
`RaceJob`, in their order, and `WrongBaseline` if that is so; a race continues with `NowRacing` and ends with
`RaceSamples`, as a `QuantizeJob` does; an `AlgorithmsJob` ends with `Algorithms`.
"""

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
    """The problem, device and protocol of a job.

    Attributes:
        problem: the problem whose operands are created.
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
        launch: its kernel's launch; None if a library launches its algorithm itself.
    """

    config: Config
    launch: Launch | HostLaunch | None


@dataclass(frozen=True)
class ScreenJob:
    """A request for a quick time of each candidate.

    Attributes:
        setup: problem, device and protocol.
        candidates: in the order they are timed.
        best_s: seconds of the best screened so far; a candidate twice as slow is not measured further.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    best_s: float


@dataclass(frozen=True)
class VerifyJob:
    """A request to compare the result of each candidate with the reference.

    Attributes:
        setup: problem and device.
        candidates: in the order they are verified.
        baseline: backend whose own choice is compared as well; "" for none.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    baseline: str = ""


@dataclass(frozen=True)
class RaceJob:
    """A request to verify each candidate, then race those that pass.

    Attributes:
        setup: problem, device and protocol.
        candidates: in the order they are verified.
        baseline: backend whose own choice races with them, if its result is right; "" for none.
        names_runners: `NowRacing` precedes each sample of the rounds, not only each warm-up.
        brief: the race ends after the fewest rounds, decided or not, and clearly slower candidates leave it after two.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    baseline: str
    names_runners: bool = False
    brief: bool = False


@dataclass(frozen=True)
class AlgorithmsJob:
    """A request to list the algorithms of a library.

    Attributes:
        setup: problem and device.
        backend: the library's backend.
        limit: maximum number of algorithms; 0 for all.
    """

    setup: MeasureSetup
    backend: str
    limit: int


@dataclass(frozen=True)
class QuantizeJob:
    """A request to time the kernels that quantise A, on separate activations, as a race with one entry.

    Attributes:
        setup: problem, device and protocol.
        launches: of the kernels in order, which read ``x`` of bf16 and write ``q`` and ``scale``; ``part`` is
            intermediate.
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
class WrongBaseline:
    """A notice that the baseline does not race, because its result is wrong.

    Attributes:
        reason: its error and the tolerance.
    """

    reason: str


@dataclass(frozen=True)
class NowRacing:
    """A notice that an entry of the race runs from now on.

    Attributes:
        name: of its config, or `core.trial.BASELINE_ENTRY`; "" if the entries alternate without notices.
    """

    name: str


@dataclass(frozen=True)
class RaceSamples:
    """The samples of a race.

    Attributes:
        samples: seconds of one launch, by the name of the config or `core.trial.BASELINE_ENTRY`.
    """

    samples: Mapping[str, Sequence[float]] = field(hash=False)


@dataclass(frozen=True)
class Algorithms:
    """The algorithms of a library.

    Attributes:
        configs: an algorithm each, in the order of the library's heuristic.
    """

    configs: tuple[Config, ...]


MeasureAnswer: TypeAlias = "OperandsReady | Trial | WrongBaseline | NowRacing | RaceSamples | Algorithms"

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
    """The problem, device and protocol of a job; the device is an ordinal of a vendor's driver."""

    problem: Problem
    target: Target
    protocol: MeasureProtocol
    vendor: str
    device: int


@dataclass(frozen=True)
class LaunchCandidate:
    """A candidate as it is sent to the device; without a launch if a library launches its algorithm itself."""

    config: Config
    launch: Launch | HostLaunch | None


@dataclass(frozen=True)
class ScreenJob:
    """A request for a quick time of each candidate.

    `best_s` is seconds of the best screened so far; a candidate twice as slow is not measured further.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    best_s: float


@dataclass(frozen=True)
class VerifyJob:
    """A request to compare the results of candidates, and of a baseline ("" for none), with the reference."""

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    baseline: str = ""


@dataclass(frozen=True)
class RaceJob:
    """A request to verify each candidate, then race those that pass.

    The baseline's own choice races with them if its result is right; "" for none. With `names_runners` `NowRacing`
    precedes each sample of the rounds, not only each warm-up. A brief race ends after the fewest rounds, decided or
    not, and clearly slower candidates leave it after two.
    """

    setup: MeasureSetup
    candidates: tuple[LaunchCandidate, ...]
    baseline: str
    names_runners: bool = False
    brief: bool = False


@dataclass(frozen=True)
class AlgorithmsJob:
    """A request to list the algorithms of a library, at most `limit` unless that is 0."""

    setup: MeasureSetup
    backend: str
    limit: int


@dataclass(frozen=True)
class QuantizeJob:
    """A request to time the kernels that quantise A, on separate activations, as a race with one entry.

    The launches are of the kernels in order, which read ``x`` of bf16 and write ``q`` and ``scale``; ``part`` is
    intermediate.
    """

    setup: MeasureSetup
    launches: tuple[Launch, ...]


MeasureJob: TypeAlias = "ScreenJob | VerifyJob | RaceJob | AlgorithmsJob | QuantizeJob"


@dataclass(frozen=True)
class OperandsReady:
    """The operands are on the device; they are cold if all copies together are larger than the last-level cache."""

    copies: int
    cold: bool


@dataclass(frozen=True)
class WrongBaseline:
    """A notice that the baseline does not race, because its result is wrong: its error and the tolerance."""

    reason: str


@dataclass(frozen=True)
class NowRacing:
    """A notice that the entry of a config's name, or of the baseline's, runs from now on; "" for entries in turns."""

    name: str


@dataclass(frozen=True)
class RaceSamples:
    """The samples of a race: seconds of one launch, by the name of the config or `core.trial.BASELINE_ENTRY`."""

    samples: Mapping[str, Sequence[float]] = field(hash=False)
    rested: Mapping[str, Sequence[float]] = field(default_factory=dict, hash=False)  # see `core.protocol.RaceResult`


@dataclass(frozen=True)
class Algorithms:
    """The algorithms of a library as configs, in the order of its heuristic."""

    configs: tuple[Config, ...]


MeasureAnswer: TypeAlias = "OperandsReady | Trial | WrongBaseline | NowRacing | RaceSamples | Algorithms"

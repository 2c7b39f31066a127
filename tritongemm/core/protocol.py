"""The classes `MeasureProtocol` (how times are taken) and `RaceResult` (the result of a final race)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tritongemm.core.target import Target
from tritongemm.core.trial import Trial

POWERS = ("rested", "sustained")  # at which clock products race that heat the GPU
# Notes of a record of sustained power: the microseconds of its kernel, and of the library, after rests.
RESTED, RESTED_LIBRARY = "rested_us", "rested_library_us"


@dataclass(frozen=True)
class RaceResult:
    """The final race of one problem."""

    trials: tuple[Trial, ...]  # one for each candidate, with its error; those that raced carry their samples
    # Seconds by config name, the baseline's under `core.trial.BASELINE_ENTRY`.
    samples: Mapping[str, Sequence[float]] = field(hash=False)
    cold: bool  # the operands were not in the last-level cache
    quantize_seconds: float | None = None  # median time in which A is quantised; None where that was not measured
    # Why the baseline's result is wrong, in which case it did not race; "" where it is right or was not compared.
    library_wrong: str = ""
    # Of a race at sustained power: the same at full clock; empty where the product doesn't heat the GPU.
    rested: Mapping[str, Sequence[float]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class MeasureProtocol:
    """How measurements are taken; trials of different protocols are not compared."""

    timer: str = "events"  # name of a plug-in of the kind `Timer`; or `core.trial.PREDICTED`
    init: str = "randn"  # distribution of the operands
    rotating_mb: int = -1  # operands rotate through this much memory; negative for three times the last-level cache
    iters: int = 200  # fewest timed launches of a finalist
    warmup: int = 5  # launches before them, beside the two of verification
    seed: int = 0  # of the operands
    err_ratio: float = 0.0  # share of the elements that may be outside the family's tolerance
    # Finalists are also run on equal rows at several places of a batch, whose bits must agree.
    compares_rows: bool = False
    # Products that heat the GPU race at the clock to which its power limit holds a long job of each, instead of full
    # clock.
    sustained: bool = False

    def rotation_bytes(self, target: Target) -> int:
        """Return the bytes that the operands rotate through on a target."""
        return 3 * target.llc_bytes if self.rotating_mb < 0 else self.rotating_mb * 2**20

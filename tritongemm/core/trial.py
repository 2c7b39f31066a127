"""The noun `Trial`: what became of a config on one problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tritongemm.core.config import Config

PREDICTED = "model"  # The timer of a trial or record whose time was predicted, not measured.
BASELINE_ENTRY = "the baseline"  # The baseline's name among a race's samples; no config's name has a blank.
STATUSES = ("ok", "pruned", "compile_failed", "out_of_resources", "timeout", "crashed", "wrong", "refused")


@dataclass(frozen=True)
class Trial:
    """What became of one config on one problem.

    Attributes:
        config: the candidate.
        status: one of `STATUSES`.
        reason: why the status is not ``ok``, with its numbers.
        samples: seconds of one launch each, in the order taken.
        timer: label of the clock that took them, or `PREDICTED`.
        stage: ``screen`` (cheap) or ``final`` (interleaved, verified).
        error: deviation from the reference as the family measures it; None when not checked.
        tolerance: largest error the family allows.
        outside: share of the elements beyond it, where some were allowed to be; None where none were.
    """

    config: Config
    status: str
    reason: str = ""
    samples: tuple[float, ...] = ()
    timer: str = ""
    stage: str = "screen"
    error: float | None = None
    tolerance: float | None = None
    outside: float | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.status!r} is not a status; there are: {', '.join(STATUSES)}")

    @property
    def seconds(self) -> float:
        """Median of the samples in seconds; only a trial that is ok has samples."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        ordered = sorted(self.samples)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / 2 / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON values; `from_json` reads them back."""
        return {**asdict(self), "config": self.config.name, "samples": list(self.samples)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        """The trial that `to_json` wrote."""
        return cls(**{**data, "config": Config.parse(data["config"]), "samples": tuple(data["samples"])})

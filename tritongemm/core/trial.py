"""The class `Trial`, which is the outcome of a config on one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Annotated, Any

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.values import TIMES, Deviation, FiniteOrNone, Text, kinds_of, one_of, read_config, require

PREDICTED = "model"  # The timer of a trial or record whose time was predicted, not measured.
BASELINE_ENTRY = "the baseline"  # The baseline's name among a race's samples; no config's name has a blank.
# How the reason begins where a kernel's source is wrong, or can't be made, of a config that nothing has refused.
OUR_FAULT = "a fault of tritongemm: "
STATUSES = ("ok", "pruned", "compile_failed", "out_of_resources", "timeout", "crashed", "wrong", "refused")
STAGES = ("screen", "final")


@dataclass(frozen=True)
class Trial:
    """The outcome of one config on one problem."""

    config: Config  # the candidate
    status: Annotated[str, one_of(*STATUSES)]  # one of `STATUSES`
    reason: Text = ""  # why the status is not `ok`, with its numbers
    samples: Annotated[tuple[float, ...], TIMES] = ()  # seconds of one launch each, in the order taken
    timer: Text = ""  # label of the clock that took them, or `PREDICTED`
    stage: Annotated[str, one_of(*STAGES)] = (
        "screen"  # one of `STAGES`: `screen` (cheap) or `final` (interleaved, verified)
    )
    error: Deviation = None  # deviation from the reference as the family measures it; None when not checked
    tolerance: FiniteOrNone = None  # largest error the family allows
    outside: FiniteOrNone = None  # share of the elements beyond it, where some were allowed to be; None where none were
    row_bits: Text = ""  # hash of one row of C on operands that are the same at every M; "" where it was not asked for
    # The reason may be gone when it is tried again, as where the process was killed from outside: no journal keeps such
    # a trial.
    try_again: bool = False

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.status!r} is not a status; there are: {', '.join(STATUSES)}")

    @property
    def seconds(self) -> float:
        """Median of the samples in seconds; only a trial that is ok has samples."""
        return median(self.samples)

    def seconds_beside(self, other: Trial) -> float:
        """Return the median of the samples in seconds or, where `other` ran more rounds, an estimate for all of those.

        That is the other's median by the two's median ratio in the rounds that both ran, as a race's first rounds
        differ.
        """
        if len(self.samples) >= len(other.samples):
            return self.seconds
        return other.seconds * median(a / b for a, b in zip(self.samples, other.samples, strict=False))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        ordered = sorted(self.samples)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / 2 / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values; `from_json` reads them back."""
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "try_again"}
        kept |= {} if kept.pop("row_bits") == "" else {"row_bits": self.row_bits}
        return {**kept, "config": self.config.name, "samples": list(self.samples)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """Return the trial that `to_json` wrote.

        Wrong values raise an InputError, missing ones or one too many a KeyError or TypeError.
        """
        require(data, _FIELD_KINDS)
        trial = cls(**{**data, "config": read_config(data["config"]), "samples": tuple(data["samples"])})
        if trial.samples and trial.status != "ok":
            raise InputError(f"samples must be an empty list where the status is {trial.status}")
        if not trial.samples and trial.status == "ok" and trial.stage == "screen":
            raise InputError("samples must not be empty where a screened config is ok")
        return trial


_FIELD_KINDS = kinds_of(Trial)

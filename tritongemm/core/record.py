"""The noun `Record`: the result of tuning one problem, as it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem


@dataclass(frozen=True)
class Record:
    """The result of tuning one problem.

    Attributes:
        problem: what was tuned.
        target: name of the target it was tuned for.
        config: the best candidate of ours.
        winner: backend that dispatch should call, e.g. ``triton``, or ``torch`` where the library won.
        seconds: median time of ``config``.
        spread: half the quartile distance of its samples, relative.
        timer: clock; ``model`` marks a prediction.
        error, tolerance: deviation from the reference, and the largest allowed.
        library_seconds: the library's time in the same run; None when not measured.
        library: which library that was.
        tie: the two were within the noise of each other.
        verified: how the result was checked.
        toolchain: versions that made it, e.g. ``{"triton": "3.6.0"}``.
        cold: the weights were not in the last-level cache.
        compute_units: of the device that it was tuned on; 0 where that is not known.
    """

    problem: Problem
    target: str
    config: Config
    winner: str
    seconds: float
    spread: float
    timer: str
    error: float | None = None
    tolerance: float | None = None
    library_seconds: float | None = None
    library: str = ""
    tie: bool = False
    verified: str = ""
    toolchain: dict[str, str] = field(default_factory=dict)
    cold: bool = True
    compute_units: int = 0

    @property
    def predicted(self) -> bool:
        """Whether its times are a model's predictions, which no timer measured."""
        return self.timer == "model"

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.seconds / 1e12

    @property
    def gbps(self) -> float:
        return self.problem.bytes / self.seconds / 1e9

    @property
    def speedup(self) -> float | None:
        """The library's time over ours."""
        return None if self.library_seconds is None else self.library_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        data = dict(self.__dict__)
        return {**data, "problem": self.problem.to_json(), "config": self.config.name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        return cls(**{**data, "problem": Problem.from_json(data["problem"]), "config": Config.parse(data["config"])})

"""The classes `Pruned`, `Prediction` and `Predictions`, which are the results of pruning and ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.config import Config


@dataclass(frozen=True)
class Pruned:
    """What pruning a search space left, and what it removed.

    Attributes:
        kept: survivors, in the order given; never empty unless nothing was given or the guard was off.
        removed: configs dropped by each rule, in the order of the rules.
        reasons: one example of each rule that dropped any: config name and reason.
        skipped: rules that would have dropped every remaining config and were not applied.
    """

    kept: tuple[Config, ...]
    removed: dict[str, int]
    reasons: dict[str, str]
    skipped: tuple[str, ...] = ()


Floats = NDArray[np.float64]

TERMS = ("matrix", "lds", "l2", "llc", "hbm", "latency", "epilogue", "scratch", "reduce", "launch")


@dataclass(frozen=True)
class Prediction:
    """What the model expects of a config.

    Attributes:
        config: the candidate.
        seconds: predicted time of one launch.
        terms: seconds each resource would need by itself, by its name in `TERMS`.
    """

    config: Config
    seconds: float
    terms: dict[str, float] = field(hash=False)


class Predictions(Sequence[Prediction]):
    """Predictions of many configs, kept as columns.

    Attributes:
        configs: the candidates.
        seconds: predicted time of one launch of each, [n].
        terms: seconds each resource would need by itself, [n, len(TERMS)].
    """

    def __init__(self, configs: tuple[Config, ...], seconds: Floats, terms: Floats) -> None:
        self.configs, self.seconds, self.terms = configs, seconds, terms

    def select(self, configs: tuple[Config, ...]) -> Predictions:
        """The predictions of some of the configs, in the order given; each must be here."""
        if configs == self.configs:
            return self
        place = {c: i for i, c in enumerate(self.configs)}
        places = [place[c] for c in configs]
        return Predictions(configs, self.seconds[places], self.terms[places])

    def __len__(self) -> int:
        return len(self.configs)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Predictions: ...
    def __getitem__(self, index: int | slice) -> Prediction | Predictions:
        configs, seconds, terms = self.configs[index], self.seconds[index], self.terms[index]
        if isinstance(configs, tuple):
            return Predictions(configs, seconds, terms)
        return Prediction(configs, float(seconds), dict(zip(TERMS, terms.tolist(), strict=True)))

"""Functions of a config, asked once for all configs that agree in what the function reads.

A space has many more configs than a function can tell apart: one that reads block_m and num_warps alone says the same
of all that share these two. So it is asked of one config, what it reads is noted, and its answer holds for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tritongemm.core.config import AXES, Config

Answer = TypeVar("Answer")


class RecordingConfig(Config):
    """A config that notes which of its axes and options are read."""

    read: set[str]

    @classmethod
    def of(cls, config: Config) -> RecordingConfig:
        watched = object.__new__(cls)
        watched.__dict__.update(config.__dict__, read=set())
        return watched

    def option(self, name: str, default: int = 0) -> int:
        self.read.add(name)
        for known, value in self.__dict__["options"]:
            if known == name:
                return int(value)
        return default


def _axis(name: str) -> property:
    def get(config: RecordingConfig) -> Any:
        held = config.__dict__
        held["read"].add(name)
        return held[name]

    return property(get)


def _options(config: RecordingConfig) -> Any:
    held: tuple[tuple[str, int], ...] = config.__dict__["options"]
    config.read.update(name for name, _ in held)
    return held


for _name in AXES:
    setattr(RecordingConfig, _name, _axis(_name))
RecordingConfig.options = property(_options)  # type: ignore[assignment]


class ConfigMemo:
    """Configs to ask functions about."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs
        # What agrees in template, backend and names of options has its values at the same places.
        kinds: dict[tuple[object, ...], tuple[tuple[str, ...], tuple[int, ...]]] = {}
        self._rows: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        for c in configs:
            known = kinds.get(key := (c.template, c.backend, c.options))
            if known is None:
                names, values = zip(*c.options, strict=True) if c.options else ((), ())
                known = kinds[key] = (c.template, c.backend, *names), values
            axes = (c.block_m, c.block_n, c.block_k, c.group_m, c.split_k, c.num_warps, c.num_stages)
            self._rows.append((known[0], axes + known[1]))

    def axes(self, *names: str) -> NDArray[np.float64]:
        """Columns of these axes."""
        places = [AXES.index(name) for name in names]
        return np.array([values[: len(AXES)] for _, values in self._rows], np.float64).T[places]

    def ask(self, function: Callable[..., Answer], *more: Sequence[Hashable]) -> list[Answer]:
        """`function` of each config, and of its own entry of each of `more`; it must depend on nothing else."""
        # The answers so far, by kind of config, places read, and the values there.
        known: dict[tuple[str, ...], dict[tuple[int, ...], dict[Hashable, Answer]]] = {}
        picks: dict[tuple[int, ...], Callable[[Any], Hashable]] = {}
        found = []
        entries = zip(*more, strict=True) if more else repeat((), len(self.configs))
        for config, (kind, values), entry in zip(self.configs, self._rows, entries, strict=True):
            asked = known.setdefault(kind, {})
            for places, answers in asked.items():
                if (key := (picks[places](values), entry)) in answers:
                    found.append(answers[key])
                    break
            else:
                watched = RecordingConfig.of(config)
                found.append(function(watched, *entry))
                names = (*AXES, *kind[2:])
                places = tuple(i for i, name in enumerate(names) if name in watched.read)
                pick = picks.setdefault(places, itemgetter(*places) if places else lambda _: ())
                asked.setdefault(places, {})[pick(values), entry] = found[-1]
        return found

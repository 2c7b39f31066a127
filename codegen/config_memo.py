"""The class `ConfigMemo`, which calls a function once for all configs that are equal in the fields it reads.

A search space has thousands of configs, and a function that reads only block_m and num_warps gives the same answer for
all that share these two. So the memo calls it with a `RecordingConfig`, which records the fields that the function
reads; configs with the same values there get the same answer without a call.
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
    """A config that notes, in `read`, the names of its axes and options that are read."""

    read: set[str]

    @classmethod
    def watch(cls, config: Config) -> RecordingConfig:
        """Return a copy of a config with an empty record of reads."""
        copy = object.__new__(cls)
        copy.__dict__.update(config.__dict__, read=set())
        return copy

    def option(self, name: str, default: int = 0) -> int:
        """Return the value of an option, whose name is recorded as read even if the config does not have it."""
        self.read.add(name)
        for known, value in self.__dict__["options"]:
            if known == name:
                return int(value)
        return default


def _axis(name: str) -> property:
    """Return a property that gives a field's value and notes that it was read."""

    def get(config: RecordingConfig) -> Any:
        fields = config.__dict__
        fields["read"].add(name)
        return fields[name]

    return property(get)


def _options(config: RecordingConfig) -> Any:
    """Return all options; each counts as read."""
    options: tuple[tuple[str, int], ...] = config.__dict__["options"]
    config.read.update(name for name, _ in options)
    return options


for _name in AXES:
    setattr(RecordingConfig, _name, _axis(_name))
RecordingConfig.options = property(_options)  # type: ignore[assignment]


class ConfigMemo:
    """A memo of functions over many configs."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs
        # Configs of one template, backend and set of option names have their values at the same places of a row.
        layouts: dict[tuple[object, ...], tuple[tuple[str, ...], tuple[int, ...]]] = {}
        self._rows: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        for c in configs:
            known = layouts.get(key := (c.template, c.backend, c.options))
            if known is None:
                names, values = zip(*c.options, strict=True) if c.options else ((), ())
                known = layouts[key] = (c.template, c.backend, *names), values
            axes = (c.block_m, c.block_n, c.block_k, c.group_m, c.split_k, c.num_warps, c.num_stages)
            self._rows.append((known[0], axes + known[1]))

    def axes(self, *names: str) -> NDArray[np.float64]:
        """Return the values of these axes as columns, [names, configs]."""
        places = [AXES.index(name) for name in names]
        columns: NDArray[np.float64] = np.array([values[: len(AXES)] for _, values in self._rows], np.float64).T
        return columns[places]

    def map(self, function: Callable[..., Answer], *columns: Sequence[Hashable]) -> list[Answer]:
        """Return the function's answer for each config, in their order.

        The function takes a config, then an entry of each of `columns`; its answer depends on nothing else.
        """
        # Answers by layout of the row, then by the places in it that a call read, then by the values found there.
        answers: dict[tuple[str, ...], dict[tuple[int, ...], dict[Hashable, Answer]]] = {}
        getters: dict[tuple[int, ...], Callable[[Any], Hashable]] = {}
        results = []
        entries = zip(*columns, strict=True) if columns else repeat((), len(self.configs))
        for config, (layout, values), entry in zip(self.configs, self._rows, entries, strict=True):
            by_places = answers.setdefault(layout, {})
            for places, known in by_places.items():
                if (key := (getters[places](values), entry)) in known:
                    results.append(known[key])
                    break
            else:
                recording = RecordingConfig.watch(config)
                results.append(function(recording, *entry))
                names = (*AXES, *layout[2:])
                places = tuple(i for i, name in enumerate(names) if name in recording.read)
                getter = getters.setdefault(places, itemgetter(*places) if places else lambda _: ())
                by_places.setdefault(places, {})[getter(values), entry] = results[-1]
        return results

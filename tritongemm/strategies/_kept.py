"""Shared by strategies: the kept configs as points, the first ones to try, and the kept config nearest to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from tritongemm.config import Config
from tritongemm.space import AXES

Floats = NDArray[np.float64]
FAR = 8.0  # steps it is from one template to another


class Kept:
    """The kept configs, best predicted first, each a point: one step is a doubling, or one more of an option."""

    def __init__(self, order: Sequence[Config]) -> None:
        self.order = tuple(dict.fromkeys(order))
        self.place = {c: i for i, c in enumerate(self.order)}
        self.templates = tuple(dict.fromkeys(c.template for c in self.order))
        self.options = tuple(sorted({name for c in self.order for name, _ in c.options}))
        self.points = self._points(self.order)

    def _points(self, configs: Sequence[Config]) -> Floats:
        axes = np.array([[getattr(c, a) for a in AXES] for c in configs], dtype=np.float64)
        options = [[float(dict(c.options).get(o, -1)) for o in self.options] for c in configs]
        template = [[FAR * (c.template == t) / 2 for t in self.templates] for c in configs]
        # Library configs may leave axes at 0.
        return np.hstack([np.log2(np.maximum(axes, 0.5)), np.array(options), np.array(template)])

    def nearest(self, config: Config, taken: Iterable[Config] = ()) -> Config | None:
        """The kept config fewest steps away, the better predicted of equals; None when all are `taken`."""
        if config in self.place and config not in (taken := set(taken)):
            return config
        steps = np.abs(self.points - self._points([config])).sum(axis=1)
        steps[[self.place[c] for c in taken if c in self.place]] = np.inf
        found = int(steps.argmin())
        return self.order[found] if np.isfinite(steps[found]) else None

    def seeds(self, seeds: Sequence[Config]) -> list[Config]:
        """Kept configs that stand for `seeds`: themselves, or the nearest of the same template."""
        found = [self.nearest(s) for s in seeds if s.template in self.templates]
        return list(dict.fromkeys(c for c in found if c is not None))

    def spread(self, count: int) -> list[Config]:
        """The first of the order, so that no template, tile or value of an axis crowds the others out.

        Half are the best predicted of distinct tiles whatever their template. The model errs most between templates, so
        a quarter goes round the templates: each gives its best of distinct tiles, and then again. The last quarter are
        the best predicted of those with a value of an axis that their template has not been tried with yet.
        """
        by_template = {t: _rounds([c for c in self.order if c.template == t]) for t in self.templates}
        overall = _rounds(self.order)
        fair = [c for turn in zip_longest(*by_template.values()) for c in turn if c is not None]
        first = dict.fromkeys(overall[: (count + 1) // 2])
        _fill(first, fair, (3 * count + 3) // 4)
        seen = {v for c in first for v in _values(c)}
        for config in self.order:
            if len(first) < count and not seen.issuperset(new := _values(config)):
                first[config] = None
                seen.update(new)
        _fill(first, fair, count)
        return list(first)


def _fill(chosen: dict[Config, None], more: Sequence[Config], count: int) -> None:
    for config in more:
        if len(chosen) >= count:
            return
        chosen.setdefault(config)


def _values(config: Config) -> list[tuple[str, str, int]]:
    fixed = [(config.template, axis, getattr(config, axis)) for axis in AXES]
    return fixed + [(config.template, name, value) for name, value in config.options]


def _rounds(order: Sequence[Config]) -> list[Config]:
    """`order` with the first of each tile and split ahead of the second of any."""
    seen: dict[tuple[object, ...], int] = {}
    turns = []
    for config in order:
        key = (config.template, *config.tile, config.split_k)
        seen[key] = seen.get(key, -1) + 1
        turns.append(seen[key])
    return [order[i] for i in sorted(range(len(order)), key=turns.__getitem__)]

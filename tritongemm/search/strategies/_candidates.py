"""Candidate sets for strategies: kept configs as points, the first configs to try, and nearest neighbours."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import zip_longest

import numpy as np

from tritongemm.codegen.template_facts import kernel_template
from tritongemm.core.config import AXES, Config
from tritongemm.plugins.contracts.searching import Floats

# steps along axes that count for a change of template
TEMPLATE_STEPS = 8.0


class CandidateSet:
    """The kept configs, best predicted first, each as a point whose coordinates are steps: doublings, or option values.

    Attributes:
        order, place: the configs, and the index of each in that order.
        templates: names of all their templates.
        options: names of the options with more than one kept value; others only repeat the template.
        axes: their axes, at least 0.5 where library configs leave them at 0, [n, len(AXES)].
        settings: their options, -1 where a config lacks the option, [n, len(options)].
        membership: 1 for a config's own template, else 0, [n, len(templates)].
        first: the index of the first config that differs from each in its launch at most: in GROUP_M, and in how
            programs are launched, [n].
        has_launch_variants: whether any two do.
    """

    def __init__(self, order: Sequence[Config]) -> None:
        self.place: dict[Config, int] = {}
        for config in order:
            self.place.setdefault(config, len(self.place))
        self.order = tuple(self.place)
        self.templates = tuple(dict.fromkeys(c.template for c in self.order))
        values: dict[str, set[int]] = {}
        for options in {c.options for c in self.order}:
            for name, value in options:
                values.setdefault(name, set()).add(value)
        self.options = tuple(sorted(name for name, found in values.items() if len(found) > 1))
        self.axes, self.settings, self.membership = self._columns(self.order)
        self._points = self._steps(self.axes, self.settings, self.membership)
        self._firsts: dict[tuple[object, ...], int] = {}
        self.first = np.array([self._firsts.setdefault(_fixed(c), i) for i, c in enumerate(self.order)], dtype=np.intp)
        self.has_launch_variants = len(self._firsts) < len(self.order)

    def stand_in(self, config: Config) -> int | None:
        """Return the index of the first config that differs in its launch at most; `config` need not be kept."""
        return self._firsts.get(_fixed(config))

    def launch_variants(self, config: Config) -> list[Config]:
        """Return the configs that differ from a kept one in their launch at most, in order."""
        return [self.order[i] for i in np.flatnonzero(self.first == self.first[self.place[config]])]

    @staticmethod
    def _steps(axes: Floats, settings: Floats, membership: Floats) -> Floats:
        return np.hstack([np.log2(axes), settings, TEMPLATE_STEPS * membership / 2])

    def _columns(self, configs: Sequence[Config]) -> tuple[Floats, Floats, Floats]:
        axes = [(c.block_m, c.block_n, c.block_k, c.group_m, c.split_k, c.num_warps, c.num_stages) for c in configs]
        known = {o: [float(dict(o).get(name, -1)) for name in self.options] for o in {c.options for c in configs}}
        settings = np.array([known[c.options] for c in configs])
        membership = np.array([c.template for c in configs])[:, None] == np.array(self.templates)
        return np.maximum(np.array(axes, np.float64), 0.5), settings, membership.astype(np.float64)

    def nearest(self, config: Config, taken: Iterable[Config] = ()) -> Config | None:
        """Return the kept config fewest steps away, the better predicted of equals; None if all are `taken`."""
        if config in self.place and config not in (taken := set(taken)):
            return config
        steps = np.abs(self._points - self._steps(*self._columns([config]))).sum(axis=1)
        steps[[self.place[c] for c in taken if c in self.place]] = np.inf
        found = int(steps.argmin())
        return self.order[found] if np.isfinite(steps[found]) else None

    def seeds(self, seeds: Sequence[Config]) -> list[Config]:
        """Return the kept configs for `seeds`: the seeds themselves, or the nearest of the same template."""
        found = [self.nearest(s) for s in seeds if s.template in self.templates]
        return list(dict.fromkeys(c for c in found if c is not None))

    def pick_varied(self, count: int) -> list[Config]:
        """Select the first configs of the order such that no template, tile or axis value crowds out the others.

        Half are the best predicted of distinct tiles of any template. As the model errs most between templates, a
        quarter cycles through the templates, each of which gives its best of distinct tiles in turn. The last quarter
        are the best predicted of those with an axis value that their template has not been tried with yet.
        """
        by_template = {t: _rounds([c for c in self.order if c.template == t]) for t in self.templates}
        overall = _rounds(self.order)
        fair = [c for turn in zip_longest(*by_template.values()) for c in turn if c is not None]
        first = dict.fromkeys(overall[: (count + 1) // 2])
        _fill(first, fair, (3 * count + 3) // 4)
        tried_values = {v for c in first for v in _values(c)}
        for config in self.order:
            if len(first) < count and not tried_values.issuperset(new := _values(config)):
                first[config] = None
                tried_values.update(new)
        _fill(first, fair, count)
        return list(first)


def _fixed(config: Config) -> tuple[object, ...]:
    """Return a config without its group of rows and its options of how programs are launched."""
    c = config
    axes = (c.block_m, c.block_n, c.block_k, c.split_k, c.num_warps, c.num_stages)
    return c.backend, c.template, *axes, _alone(c.template, c.options)


@cache
def _alone(template: str, options: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    of_launches = kernel_template(template).launch_options
    return tuple(o for o in options if o[0] not in of_launches)


def _fill(chosen: dict[Config, None], more: Sequence[Config], count: int) -> None:
    for config in more:
        if len(chosen) >= count:
            return
        chosen.setdefault(config)


def _values(config: Config) -> list[tuple[str, str, int]]:
    fixed = [(config.template, axis, getattr(config, axis)) for axis in AXES]
    return fixed + [(config.template, name, value) for name, value in config.options]


def _rounds(order: Sequence[Config]) -> list[Config]:
    """Return `order` with the first of each tile and split ahead of the second of any."""
    latest: dict[tuple[object, ...], int] = {}  # turn of the last config with a tile and split
    turns = []
    for config in order:
        key = (config.template, *config.tile, config.split_k)
        latest[key] = latest.get(key, -1) + 1
        turns.append(latest[key])
    return [order[i] for i in sorted(range(len(order)), key=turns.__getitem__)]

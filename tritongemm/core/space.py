"""The classes `TemplateSpace` and `Space`, the configs of one problem on one target, and `SearchLimits` of them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tritongemm.core.config import AXES, BLOCKS, Config
from tritongemm.core.problem import Problem
from tritongemm.core.reduction_order import ReductionOrder
from tritongemm.core.target import Target


@dataclass(frozen=True)
class TemplateSpace:
    """The values that each field of one template's configs may have."""

    template: str  # its name
    # A name and its values for each axis, the fixed fields of a config (`AXES`) first, then options.
    values: tuple[tuple[str, tuple[int, ...]], ...]
    backend: str = "triton"  # whose template it is

    def __len__(self) -> int:
        return prod(len(v) for _, v in self.values)

    @cached_property
    def _options(self) -> tuple[tuple[str, int], ...]:
        """The names of the options as a config has them, sorted, each with its place in a point."""
        return tuple(sorted((name, place) for place, (name, _) in enumerate(self.values) if place >= len(AXES)))

    def config(self, point: tuple[int, ...]) -> Config:
        """Return the config at a point: one value for each axis, in their order."""
        # A space has a hundred thousand of them, and the constructor, which sorts options, takes twice as long.
        config = object.__new__(Config)
        fields = config.__dict__
        fields["template"] = self.template
        fields.update(zip(AXES, point, strict=False))
        fields["options"] = tuple([(name, point[place]) for name, place in self._options])
        fields["backend"] = self.backend
        return config

    def first(self) -> Config:
        """Return the config with the first value of each axis: a sample of the template."""
        return self.config(tuple(values[0] for _, values in self.values))

    def with_same_bytes_in_flight(self, config: Config, other: Config) -> Config:
        """Return the config whose pipeline keeps about as many bytes of A and B under way as another's."""
        elements = {c: (c.block_m + c.block_n) * c.block_k for c in (config, other)}  # of one stage
        stages = other.num_stages * elements[other] / elements[config]
        return replace(config, num_stages=min(dict(self.values)["num_stages"], key=lambda n: abs(n - stages)))

    def point(self, config: Config) -> tuple[int, ...]:
        """Return the config's value of each axis; an option that it does not name has the axis's first value."""
        return tuple(
            getattr(config, name) if name in AXES else config.option(name, values[0]) for name, values in self.values
        )


@dataclass(frozen=True)
class Space:
    """All configs of one problem on one target, before pruning: the axes of each template that fits the problem."""

    target: Target
    problem: Problem
    axes: tuple[TemplateSpace, ...]

    def __len__(self) -> int:
        return sum(map(len, self.axes))

    def __iter__(self) -> Iterator[Config]:
        for axes in self.axes:
            yield from map(axes.config, itertools.product(*(v for _, v in axes.values)))

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Yield configs one step away along one axis; from blocks of another size also with as many bytes under way."""
        axes = next(a for a in self.axes if a.template == config.template)
        point = axes.point(config)
        for i, (name, values) in enumerate(axes.values):
            place = values.index(point[i]) if point[i] in values else None
            for j in range(len(values)) if place is None else (place - 1, place + 1):
                if 0 <= j < len(values):
                    near = axes.config((*point[:i], values[j], *point[i + 1 :]))
                    yield near
                    if name in BLOCKS:
                        yield axes.with_same_bytes_in_flight(near, config)


@dataclass(frozen=True)
class SearchLimits:
    """Limits on the configs to try, set by a user or by another program's kernel."""

    most_splits: int = 0  # largest number of programs that share a tile's K loop; 0 for any
    templates: tuple[str, ...] = ()  # names of the templates; empty for all
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # allowed values of an axis; all others are free
    # The only options that a config may set, all others being at their defaults; None for all.
    options: tuple[str, ...] | None = None
    first: tuple[Config, ...] = ()  # configs that are tried in any case
    interpreted: bool = False  # only templates whose kernels an interpreter can check, where no GPU will check others
    order: ReductionOrder | None = None  # the only reduction order; None for any

    def allow(self, config: Config) -> bool:
        """Say whether a listed kernel, which is of none of our templates, may be tried."""
        return not self.most_splits or config.split_k <= self.most_splits

    def narrow(self, space: Space) -> Space:
        """Return the part of a space that may be tried."""
        axes = (self._narrow(a) for a in space.axes if not self.templates or a.template in self.templates)
        return replace(space, axes=tuple(a for a in axes if len(a)))

    def _narrow(self, axes: TemplateSpace) -> TemplateSpace:
        values = (
            (name, tuple(v for v in values if self._has(name, v)))
            for name, values in axes.values
            if name in AXES or self.options is None or name in self.options
        )
        return replace(axes, values=tuple(values))

    def _has(self, axis: str, value: int) -> bool:
        if axis == "split_k" and self.most_splits:
            return value <= self.most_splits
        return value in dict(self.axes).get(axis, (value,))

"""The class `SearchLimits`, which is the part of a search space that may be tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tritongemm.core.config import AXES, Config
from tritongemm.core.space import Space, TemplateSpace


@dataclass(frozen=True)
class SearchLimits:
    """Limits on the configs to try, set by a user or by another program's kernel.

    Attributes:
        most_splits: largest number of programs that share a tile's K loop; 0 for any.
        templates: names of the templates; empty for all.
        axes: allowed values of an axis; all others are free.
        options: the only options that a config may set, all others being at their defaults; None for all.
        first: configs that are tried in any case.
        interpreted: only templates whose kernels an interpreter can check, where no GPU will check others.
    """

    most_splits: int = 0
    templates: tuple[str, ...] = ()
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    options: tuple[str, ...] | None = None
    first: tuple[Config, ...] = ()
    interpreted: bool = False

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

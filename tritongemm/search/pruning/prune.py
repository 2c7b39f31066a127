"""Stage: Space → kept configs, and a count per rule; a rule is asked once for all configs it can't tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.config_memo import RecordingConfig
from tritongemm.core.problem import Problem
from tritongemm.core.search_results import Pruned
from tritongemm.core.space import Space, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.search.pruning.rules import RULES, Check, Rule
from tritongemm.search.typical import typical

Mask = npt.NDArray[np.bool_]
_ALL = slice(None)
# Axes get shorter each time that so many times fewer candidates are left: to find those takes time too.
SPARSE = 16


def prune(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    rules: tuple[Rule, ...] = RULES,
    never_zero: bool = True,
) -> Pruned:
    """Apply `rules` one after the other.

    Args:
        configs: candidates; a `Space` is pruned without making its configs one by one.
        problem: what they compute.
        target: where they run.
        rules: in the order they apply.
        never_zero: skip a rule that would leave nothing; False shows what the rules would do by themselves.
    """
    problem = typical(problem)
    grids: list[_Product | _Listed]
    grids = [_Product(a) for a in configs.axes] if isinstance(configs, Space) else [_Listed(list(configs))]
    removed, reasons, skipped = dict[str, int](), dict[str, str](), list[str]()
    left = sum(int(np.count_nonzero(g.left)) for g in grids)
    for rule in rules:
        answers = [g.apply(rule, problem, target) for g in grids]
        dropped = sum(int(np.count_nonzero(drops)) for drops, _ in answers)
        if left and dropped == left and never_zero:
            skipped.append(rule.name)
            dropped = 0
        removed[rule.name] = dropped
        if dropped:
            reasons[rule.name] = next(example for _, example in answers if example)
            for grid, (drops, _) in zip(grids, answers, strict=True):
                grid.drop(drops)
            left -= dropped
    return Pruned(tuple(c for g in grids for c in g.kept()), removed, reasons, tuple(skipped))


class _Listed:
    """Candidates of any origin, one by one."""

    def __init__(self, configs: list[Config]) -> None:
        self.configs, self.left = configs, np.ones(len(configs), bool)

    def kept(self) -> list[Config]:
        return [self.configs[i] for i in np.flatnonzero(self.left)]

    def drop(self, drops: Mask) -> None:
        """Those marked are no longer left."""
        self.left &= ~drops

    def apply(self, rule: Rule, problem: Problem, target: Target) -> tuple[Mask, str]:
        """Which of those left `rule` drops, and the first of them with the reason."""
        drops, example = np.zeros_like(self.left), ""
        for i in np.flatnonzero(self.left):
            config = self.configs[i]
            if not _judges(rule, config.template):
                continue
            reason = rule.check(config, problem, target)
            if reason is not None:
                drops[i], example = True, example or f"{config.name}: {reason}"
        return drops, example


class _Product:
    """Candidates that are the product of axes; `left` has a dimension for each, as long as the values that are left."""

    def __init__(self, axes: TemplateSpace) -> None:
        self.axes, self._values = axes, [values for _, values in axes.values]
        self.left = np.ones([len(values) for values in self._values], bool)
        self._few = self.left.size // SPARSE  # so many left are worth shorter axes
        self._whole: set[tuple[int, int]] = set()  # axes and values that the last rule dropped by themselves

    def _config(self, place: Sequence[int]) -> Config:
        return self.axes.config(tuple([values[i] for values, i in zip(self._values, place, strict=True)]))

    def kept(self) -> list[Config]:
        return [self._config(place) for place in np.argwhere(self.left).tolist()]

    def drop(self, drops: Mask) -> None:
        """Those marked are no longer left, nor values that none of the others has, once these are few."""
        self.left &= ~drops
        for axis in {axis for axis, _ in self._whole}:
            self._keep(axis, [i for i in range(len(self._values[axis])) if (axis, i) not in self._whole])
        count = int(np.count_nonzero(self.left))
        if 0 < count <= self._few:
            self._few = count // SPARSE
            for axis in range(len(self._values)):
                self._keep(axis, self._used(axis).tolist())

    def _keep(self, axis: int, used: list[int]) -> None:
        """Leave of an axis the values at these places."""
        if len(used) < len(self._values[axis]):
            self.left = self.left.take(used, axis)
            self._values[axis] = tuple([self._values[axis][i] for i in used])

    def _used(self, axis: int) -> npt.NDArray[np.intp]:
        """Places of an axis's values that any candidate left has."""
        extents = self.left.shape
        # The outer axes first: that pass reads all of memory in order, and leaves little for the other.
        folded = np.bitwise_or.reduce(self.left.reshape(prod(extents[:axis]), -1), axis=0)
        return np.flatnonzero(folded.reshape(extents[axis], -1).any(axis=1))

    def apply(self, rule: Rule, problem: Problem, target: Target) -> tuple[Mask, str]:
        """As `_Listed.apply`, asking once for all that agree in what the rule reads."""
        drops, example = np.zeros_like(self.left), ""
        self._whole.clear()
        if _judges(rule, self.axes.template):
            for check in rule.parts(self.axes.template) if rule.parts else (rule.check,):
                example = self._drop(check, problem, target, drops) or example
        return drops & self.left, example

    def _drop(self, check: Check, problem: Problem, target: Target, drops: Mask) -> str:
        """Mark in `drops` what a check drops of those left that are not marked; the first of them with the reason."""
        todo, example = self.left & ~drops, ""
        extents = self.left.shape
        steps = [prod(extents[i + 1 :]) for i in range(len(extents))]  # from a value to the axis's next one
        flat, first = todo.reshape(-1), 0
        while len(flat) and flat[first := first + int(flat[first:].argmax())]:
            place = [first // step % extent for step, extent in zip(steps, extents, strict=True)]
            config = RecordingConfig.watch(self._config(place))
            reason = check(config, problem, target)
            read = config.read
            same = tuple([i if name in read else _ALL for (name, _), i in zip(self.axes.values, place, strict=True)])
            todo[same] = False
            if reason is not None:
                drops[same] = True
                places = [(axis, i) for axis, i in enumerate(same) if isinstance(i, int)]
                if len(places) == 1:
                    self._whole.add(places[0])
                example = example or f"{config.name}: {reason}"
        return example


def _judges(rule: Rule, template: str) -> bool:
    """Whether a rule looks at the configs of a template."""
    return not rule.group or rule.group in search_facts(template).rules

"""Stage: Space → kept configs, and a count per rule; a rule checks configs that agree in what it reads once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import numpy as np
import numpy.typing as npt

from tritongemm.codegen.config_memo import RecordingConfig
from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.space import Space, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.search.pruning.rules import RULES, Check, Rule
from tritongemm.search.typical import typical

Mask = npt.NDArray[np.bool_]
# A dropped candidate: the places of its values among those of the space, and its name with the reason.
Dropped = tuple[tuple[int, ...], str]


class ListedCandidates:
    """Candidates of any origin, one by one."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs

    def __len__(self) -> int:
        return len(self.configs)

    def kept(self) -> list[Config]:
        """Return the candidates that are left, in the order given."""
        return list(self.configs)

    def without(self, rule: Rule, problem: Problem, target: Target) -> tuple[ListedCandidates, str]:
        """Return the candidates that a rule keeps, and the first that it drops with the reason, or "" for none."""
        left, example = list[Config](), ""
        for config in self.configs:
            reason = rule.check(config, problem, target) if _applies(rule, config.template) else None
            if reason is None:
                left.append(config)
            else:
                example = example or f"{config.name}: {reason}"
        return ListedCandidates(left), example


@dataclass(frozen=True, eq=False)
class _Part:
    """Some axes of a product, and which combinations of their values are left."""

    axes: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    left: Mask

    def shortened(self) -> _Part:
        """Return the part without the values that no combination left has."""
        values, left = list(self.values), self.left
        for axis in range(len(values)):
            extents = left.shape
            if extents[axis] == 1:
                continue  # a part has combinations left
            # The outer axes first: that pass reads all of memory in order, and leaves little for the other.
            folded = np.bitwise_or.reduce(left.reshape(prod(extents[:axis]), -1), axis=0)
            used = np.flatnonzero(folded.reshape(extents[axis], -1).any(axis=1))
            if len(used) < len(values[axis]):
                values[axis] = tuple([values[axis][i] for i in used])
                left = left.take(used, axis)
        return _Part(self.axes, tuple(values), left)

    def first(self) -> tuple[int, ...]:
        """Return the place of the first combination that is left."""
        return _first(self.left)

    def write(self, place: Sequence[int], point: list[int]) -> None:
        """Set the values of these axes in a config's point to those at a place."""
        for axis, values, i in zip(self.axes, self.values, place, strict=True):
            point[axis] = values[i]

    def joined(self, other: _Part) -> _Part:
        """Return a part with the axes of two, and each combination of what the two have left."""
        values = dict(zip(self.axes + other.axes, self.values + other.values, strict=True))
        axes = tuple(sorted(values))
        return _Part(axes, tuple([values[axis] for axis in axes]), self.outer(self.left, other, other.left))

    def outer(self, mine: Mask, other: _Part, others: Mask) -> Mask:
        """Return a mask over the axes of two parts, True where a mask over each part's axes is."""
        order = np.argsort(self.axes + other.axes)
        both: Mask = np.logical_and.outer(mine, others).transpose(order).copy()
        return both


_NO_AXES = _Part((), (), np.ones((), bool))
_ALL = slice(None)
PLACES_AT_ONCE = 4096  # places that are looked up in an array; most are settled with others before their turn comes


@dataclass(frozen=True)
class ProductCandidates:
    """Candidates of one template, as a product of independent parts; each axis of its space is in one of them."""

    space: TemplateSpace
    parts: tuple[_Part, ...]

    @classmethod
    def of_space(cls, space: TemplateSpace) -> ProductCandidates:
        """Return all configs of a template's space."""
        each = (_Part((i,), (values,), np.ones(len(values), bool)) for i, (_, values) in enumerate(space.values))
        return cls(space, tuple(each))

    def __len__(self) -> int:
        return prod(int(np.count_nonzero(part.left)) for part in self.parts)

    def kept(self) -> list[Config]:
        """Return the candidates that are left, in the order of the space."""
        if not len(self):
            return []
        joined = reduce(_Part.joined, (part.shortened() for part in self.parts), _NO_AXES)
        places = np.argwhere(joined.left).tolist()
        return [self.space.config(tuple([v[i] for v, i in zip(joined.values, place, strict=True)])) for place in places]

    def without(self, rule: Rule, problem: Problem, target: Target) -> tuple[ProductCandidates, str]:
        """Return what `ListedCandidates.without` would, checking all that agree in what the rule reads at once."""
        left, firsts = self, list[Dropped]()
        if _applies(rule, self.space.template):
            for check in rule.parts(self.space.template) if rule.parts else (rule.check,):
                left, first = left._without(check, problem, target)
                firsts += first
        return left, min(firsts)[1] if firsts else ""

    def _without(self, check: Check, problem: Problem, target: Target) -> tuple[ProductCandidates, list[Dropped]]:
        """Return the candidates that one check of a rule keeps, and the first that it drops, if it drops any."""
        first = list[Dropped]()
        if not len(self):
            return self, first
        axis_of = {name: axis for axis, (name, _) in enumerate(self.space.values)}
        # A value of each axis; of those that the check has not read so far any that is left will do.
        point = [0] * len(axis_of)
        for part in self.parts:
            part.write(part.first(), point)
        others, joined = list(self.parts), _NO_AXES  # `joined` has all axes that the check has read
        unasked, dropped = joined.left.copy(), np.zeros((), bool)
        places = _places(unasked)
        known, names = set[str](), list[str]()  # names that the check has read, and names of the joined axes
        while (place := next(places, None)) is not None:
            joined.write(place, point)
            config = RecordingConfig.watch(self.space.config(tuple(point)))
            reason = check(config, problem, target)
            if not config.read <= known:
                known |= config.read
                read = {axis_of[name] for name in config.read if name in axis_of}
                for part in [part.shortened() for part in _take(others, read)]:
                    at = dict(zip(joined.axes + part.axes, place + part.first(), strict=True))
                    unasked = joined.outer(unasked, part, part.left)
                    dropped = joined.outer(dropped, part, part.left)
                    joined = joined.joined(part)
                    place = tuple([at[axis] for axis in joined.axes])
                names = [self.space.values[axis][0] for axis in joined.axes]
                places = _places(unasked)
            same = tuple([i if name in config.read else _ALL for name, i in zip(names, place, strict=True)])
            unasked[same] = False
            if reason is not None:
                dropped[same] = True
                first = first or [(self._place_of(point), f"{config.name}: {reason}")]
        if not first:
            return self, first
        return replace(self, parts=(*others, replace(joined, left=joined.left & ~dropped))), first

    def _place_of(self, point: Sequence[int]) -> tuple[int, ...]:
        """Return the place of each of a config's values among those of its axis in the space."""
        return tuple([values.index(value) for (_, values), value in zip(self.space.values, point, strict=True)])


def _first(mask: Mask) -> tuple[int, ...]:
    """Return the first place of an array that is True."""
    return tuple([int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)])


def _places(mask: Mask) -> Iterator[tuple[int, ...]]:
    """Yield the places of an array that are True when their turn comes, in order."""
    flat, shape = mask.reshape(-1), mask.shape or (1,)
    for start in range(0, flat.size, PLACES_AT_ONCE):
        there = start + np.flatnonzero(flat[start : start + PLACES_AT_ONCE])
        places = np.transpose(np.unravel_index(there, shape)).tolist()
        for i, place in zip(there.tolist(), places, strict=True):
            if flat[i]:
                yield tuple(place[: mask.ndim])


def _take(parts: list[_Part], axes: Collection[int]) -> list[_Part]:
    """Remove those parts that have any of these axes, and return them."""
    taken = [part for part in parts if any(axis in axes for axis in part.axes)]
    parts[:] = [part for part in parts if part not in taken]
    return taken


def _applies(rule: Rule, template: str) -> bool:
    """Return whether a rule applies to the configs of a template."""
    return not rule.group or rule.group in search_facts(template).rules


def prune(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    rules: tuple[Rule, ...] = RULES,
    never_zero: bool = True,
) -> Pruned:
    """Apply `rules` one after the other.

    A `Space` is pruned without making its configs one by one. A rule that would leave nothing is skipped, unless
    `never_zero` is False, to show what the rules would do by themselves.
    """
    problem = typical(problem)
    candidates: list[ListedCandidates | ProductCandidates]
    if isinstance(configs, Space):
        candidates = [ProductCandidates.of_space(axes) for axes in configs.axes]
    else:
        candidates = [ListedCandidates(list(configs))]
    removed, reasons, skipped = dict[str, int](), dict[str, str](), list[str]()
    left = sum(map(len, candidates))
    for rule in rules:
        checked = [c.without(rule, problem, target) for c in candidates]
        dropped = left - sum(len(c) for c, _ in checked)
        if left and dropped == left and never_zero:
            skipped.append(rule.name)
            dropped = 0
        removed[rule.name] = dropped
        if dropped:
            reasons[rule.name] = next(example for _, example in checked if example)
            candidates = [c for c, _ in checked]
            left -= dropped
    return Pruned(tuple(config for c in candidates for config in c.kept()), removed, reasons, tuple(skipped))

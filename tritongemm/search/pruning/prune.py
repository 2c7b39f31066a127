"""Stage: Space → kept configs, and a count per rule; a rule checks configs that agree in what it reads once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product, starmap
from math import prod
from operator import add, itemgetter

from tritongemm.codegen.config_memo import RecordingConfig
from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.space import Space, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.search.pruning.rules import RULES, Check, Rule
from tritongemm.search.typical import typical

Place = tuple[int, ...]
# A dropped candidate: the places of its values among those of the space, and its name with the reason.
Dropped = tuple[Place, str]


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
    """Some axes of a product in the space's order, and the places of the values of each combination that is left."""

    axes: tuple[int, ...]
    left: list[Place]

    def write(self, row: Place, place: list[int]) -> None:
        """Set the places on these axes to those of a combination."""
        for axis, i in zip(self.axes, row, strict=True):
            place[axis] = i

    def joined(self, other: _Part) -> _Part:
        """Return a part with the axes of two, and each combination of what the two have left."""
        both = self.axes + other.axes
        in_order = _picker(sorted(range(len(both)), key=both.__getitem__))
        return _Part(in_order(both), sorted(map(in_order, starmap(add, product(self.left, other.left)))))


_NO_AXES = _Part((), [()])


@dataclass(frozen=True)
class ProductCandidates:
    """Candidates of one template, as a product of independent parts; each axis of its space is in one of them."""

    space: TemplateSpace
    parts: tuple[_Part, ...]

    @classmethod
    def of_space(cls, space: TemplateSpace) -> ProductCandidates:
        """Return all configs of a template's space."""
        return cls(space, tuple([_Part((i,), [(j,) for j in range(len(v))]) for i, (_, v) in enumerate(space.values)]))

    def __len__(self) -> int:
        return prod(len(part.left) for part in self.parts)

    def kept(self) -> list[Config]:
        """Return the candidates that are left, in the order of the space."""
        return [self._config(place) for place in reduce(_Part.joined, self.parts, _NO_AXES).left] if len(self) else []

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
        if not len(self):
            return self, []
        axis_of = {name: axis for axis, (name, _) in enumerate(self.space.values)}
        others, joined = list(self.parts), _NO_AXES  # `joined` has all axes that the check has read
        # What the check says, by the axes that it reads for it, then by the places of their values.
        answers = dict[Place, dict[Place, str | None]]()
        while True:  # once more whenever the check has read axes of other parts
            # A place on each axis; of those that the check has not read so far any that is left will do.
            place = [0] * len(axis_of)
            for part in others:
                part.write(part.left[0], place)
            at = {axis: i for i, axis in enumerate(joined.axes)}
            known = [(_picker([at[axis] for axis in axes]), said) for axes, said in answers.items()]
            reasons = list[str | None]()
            for row in joined.left:
                for pick, said in known:
                    if (key := pick(row)) in said:
                        reasons.append(said[key])
                        break
                else:
                    joined.write(row, place)
                    config = RecordingConfig.watch(self._config(place))
                    reasons.append(check(config, problem, target))
                    axes = tuple(sorted(axis_of[name] for name in config.read if name in axis_of))
                    said = answers.setdefault(axes, {})
                    said[tuple([place[axis] for axis in axes])] = reasons[-1]
                    if taken := _take(others, axes):
                        joined = reduce(_Part.joined, taken, joined)
                        break
                    if len(known) < len(answers):
                        known.append((_picker([at[axis] for axis in axes]), said))
            else:
                break
        dropped = next((i for i, reason in enumerate(reasons) if reason is not None), None)
        if dropped is None:
            return self, []
        joined.write(joined.left[dropped], place)
        first = (tuple(place), f"{self._config(place).name}: {reasons[dropped]}")
        kept = [row for row, reason in zip(joined.left, reasons, strict=True) if reason is None]
        return replace(self, parts=(*others, replace(joined, left=kept))), [first]

    def _config(self, place: Sequence[int]) -> Config:
        """Return the config with these values, by their places on the axes of the space."""
        return self.space.config(tuple([v[i] for (_, v), i in zip(self.space.values, place, strict=True)]))


def _picker(places: Sequence[int]) -> Callable[[Place], Place]:
    """Return a function that picks some numbers of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda row: tuple([row[i] for i in places])


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

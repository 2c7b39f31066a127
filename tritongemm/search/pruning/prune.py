"""Stage: Space → kept configs, and a count per rule; a rule checks configs that agree in what it reads once."""

from collections.abc import Iterable

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.space import Space
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Pruned
from tritongemm.search.pruning.candidates import ListedCandidates, ProductCandidates
from tritongemm.search.pruning.rules import RULES, Rule
from tritongemm.search.typical import typical


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

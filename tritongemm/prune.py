"""Stage: Space → kept configs, and a count per rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tritongemm.config import Config
from tritongemm.problem import Problem
from tritongemm.rules import RULES, Rule
from tritongemm.rules_tune_gemm import TUNE_GEMM_RULES
from tritongemm.target import Target

__all__ = ["RULES", "TUNE_GEMM_RULES", "Pruned", "Rule", "prune"]


@dataclass(frozen=True)
class Pruned:
    """Outcome of `prune`.

    Attributes:
        kept: survivors, in the order given; never empty unless nothing was given or the guard was off.
        removed: configs dropped by each rule, in the order of the rules.
        reasons: one example of each rule that dropped any: config name and reason.
        skipped: rules that would have dropped every remaining config and were not applied.
    """

    kept: tuple[Config, ...]
    removed: dict[str, int]
    reasons: dict[str, str]
    skipped: tuple[str, ...] = ()


def prune(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    rules: tuple[Rule, ...] = RULES,
    never_zero: bool = True,
) -> Pruned:
    """Apply `rules` one after the other.

    Args:
        configs: candidates.
        problem, target: what they are judged for.
        rules: in the order they apply.
        never_zero: skip a rule that would leave nothing; False shows what the rules would do by themselves.
    """
    kept, removed, reasons, skipped = list(configs), dict[str, int](), dict[str, str](), list[str]()
    for rule in rules:
        check, survivors, dropped, example = rule.check, [], 0, ""
        for config in kept:
            exempt = rule.templates and config.template not in rule.templates
            if exempt or (reason := check(config, problem, target)) is None:
                survivors.append(config)
            else:
                dropped += 1
                example = example or f"{config.name}: {reason}"
        if kept and not survivors and never_zero:
            skipped.append(rule.name)
            dropped = 0
        else:
            kept = survivors
        removed[rule.name] = dropped
        if dropped:
            reasons[rule.name] = example
    return Pruned(tuple(kept), removed, reasons, tuple(skipped))

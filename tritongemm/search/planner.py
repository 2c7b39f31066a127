"""Plans a search without a GPU: a problem's space is pruned and ranked."""

from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.codegen import template_facts
from tritongemm.codegen.fact_sections import PAIRWISE, RUNS
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.reduction_order import PAIRS
from tritongemm.core.space import SearchLimits, Space, TemplateSpace
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend
from tritongemm.plugins.contracts.searching import Predictions, Pruned
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.search.pruning.rules import RULES, Rule
from tritongemm.search.pruning.rules.persistent import RING_SLOTS_LIMIT, each_need, needs

NO_LIMITS = SearchLimits()


@dataclass(frozen=True)
class PlannedProblem:
    """The search space of one problem, before and after pruning, ranked."""

    problem: Problem
    space: Space
    order: Predictions
    pruned: Pruned


def _rules(limits: SearchLimits, searched: SearchedBackend, problem: Problem) -> tuple[Rule, ...]:
    """Return the rules of pruning, with one for the only reduction order that limits allow.

    If that is of several runs, splits are kept where an unsplit K would fill the device.
    """
    if limits.order is None:
        return RULES
    wanted = limits.order

    def other_order(config: Config, _: Problem, target: Target) -> str | None:
        order = searched.reduction_order(config, problem, target)
        return None if order == wanted else f"{order}, not {wanted}"

    # What any kernel needs is asked next: other rules may leave none but configs without it, which would stay then.
    others = [rule for rule in RULES if rule.name != "needs" and (wanted.runs == 1 or rule.name != "split_k")]
    return Rule("order", other_order), Rule("needs", needs, parts=each_need), *others


def _with_runs(space: Space, limits: SearchLimits) -> Space:
    """Return a space with the options to add up K in the order of splits, where an order of several runs is wanted."""
    runs = limits.order.runs if limits.order else 1
    pairwise = limits.order is not None and limits.order.sums == PAIRS
    added = ((RUNS, (runs,)), (PAIRWISE, (1,))) if pairwise else ((RUNS, (1, runs)),)

    def wider(axes: TemplateSpace) -> TemplateSpace:
        if runs == 1 or axes.template not in template_facts.names():
            return axes
        template = template_facts.kernel_template(axes.template)
        able = template.order.most_runs >= runs and all(name in template.constexprs for name, _ in added)
        return replace(axes, values=(*axes.values, *added)) if able else axes

    return replace(space, axes=tuple(map(wider, space.axes)))


def rank_space(
    problem: Problem, target: Target, backend: str, limits: SearchLimits = NO_LIMITS
) -> tuple[Space, Pruned, Predictions]:
    """Return a problem's space, what pruning keeps of it, and that in the order of the time that the model expects."""
    searched = registry.get(SearchedBackend, backend)
    space = limits.narrow(searched.space(problem, target))
    if not limits.templates:
        space = replace(space, axes=tuple(a for a in space.axes if not template_facts.search_facts(a.template).asked))
    if limits.interpreted and (checked := tuple(a for a in space.axes if searched.interpreted(a.first()))):
        space = replace(space, axes=checked)
    space = _with_runs(space, limits)
    pruned = prune.prune(space, problem, target, _rules(limits, searched, problem))
    if "order" in pruned.skipped:
        pruned = replace(pruned, kept=())  # no config has that order
    return space, pruned, cost_model.rank(tuple(dict.fromkeys((*pruned.kept, *limits.first))), problem, target)


def expected_best(
    problem: Problem, target: Target, backend: str, limits: SearchLimits = NO_LIMITS, near: float = 1.1
) -> list[Config]:
    """Return the kernels that the model expects to be the fastest of a problem.

    They are the best tile in each form in which its programs may be launched, with blocks of each depth and rings of
    the usual one and of more slots, then one kernel of each tile that is expected to take at most `near` times as long.
    """
    ranked = rank_space(problem, target, backend, limits)[2]
    found: dict[tuple[object, ...], Config] = {}
    for config, seconds in zip(ranked.configs, ranked.seconds.tolist(), strict=True):
        if seconds > near * ranked.seconds[0]:
            break
        tile = config.template, config.block_m, config.block_n, config.split_k
        first = next(iter(found.values()), config)
        is_best = tile == (first.template, first.block_m, first.block_n, first.split_k)
        forms = template_facts.kernel_template(config.template).launch_options if is_best else ()
        depths = (config.block_k, config.num_stages > RING_SLOTS_LIMIT) if is_best else ()
        found.setdefault((*tile, *depths, *map(config.option, forms)), config)
    return list(found.values())


def plan_search(
    problem: Problem, target: Target, folder: Path | None, backend: str, limits: SearchLimits = NO_LIMITS
) -> PlannedProblem:
    """Plan one problem, and write a module with all of its candidates into a folder, if there is one."""
    space, pruned, order = rank_space(problem, target, backend, limits)
    if folder is not None:
        registry.get(SearchedBackend, backend).write_candidates(problem, order.configs, target, folder)
    return PlannedProblem(problem, space, order, pruned)

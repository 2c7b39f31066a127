"""Lists the families that a target computes, for messages that refuse or leave out another one."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

from tritongemm.core.dtypes import dtype
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.target import Target
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, WeightLayout

_SIZES = (128, 256, 512)  # which every family takes


def computable_families(target: Target) -> tuple[str, ...]:
    """Return the names of the families and variants that a target can compute, whatever kernels there are."""
    return tuple(_computable(target))


def defaults_on(target: Target, defaults: Defaults) -> Defaults:
    """Return the default types of rows without their own, on a target: also its encoding of fp8."""
    families = computable_families(target) if target.fp8 == "none" else ()
    return replace(defaults, fp8_encoding=target.fp8, families=families)


def name_others(problem: Problem, target: Target) -> str:
    """Return a list of what a target computes, where it can't compute a problem's family; "" where it can."""
    found = _computable(target)
    if any((typical.family, typical.b.order) == (problem.family, problem.b.order) for typical in found.values()):
        return ""
    return f"; {target.name} computes the families {', '.join(found)}"


def is_computed_by(problem: Problem, targets: Iterable[Target]) -> bool:
    """Return whether any of these targets computes a problem, whatever kernels there are."""
    family = registry.get(Family, problem.family)
    return any(family.supports(problem, target) for target in targets)


def in_fastest_order(problem: Problem, arch: str) -> Problem:
    """Return a problem with its weight in the order that an architecture's kernels read the fastest, as far as known.

    A weight of four bits is converted when it is loaded, to whichever order rows read. Beside an A of eight bits none
    is known to be fast.
    """
    if problem.kind == "batched" or problem.b.type.packed == problem.a.type.packed or problem.a.type.bytes == 1:
        return problem
    layouts = {name: registry.get(WeightLayout, name) for name in registry.names(WeightLayout)}
    fitting = (name for name, one in layouts.items() if arch in one.fastest_on and one.supports(problem))
    return replace(problem, b=problem.b._replace(order=next(fitting, problem.b.order)))


@cache
def _computable(target: Target) -> Mapping[str, Problem]:
    """Return the families and variants, each with a typical problem; cached, as every row that is left out asks."""
    found: dict[str, Problem] = {}
    for family in registry.every(Family):
        for name in (family.name, *family.variants):
            problem = next((p for p in _typical(name, target) if family.supports(p, target)), None)
            if problem is not None:
                found[name] = problem
    return found


def _typical(name: str, target: Target) -> Iterator[Problem]:
    """Yield the problems of a family in its own dtypes, and in int8, which targets without fp8 multiply."""
    family, given = registry.family_of(name)
    for a in (given.a.dtype, "int8"):
        with suppress(InputError):  # the target has no such dtype
            a_, b, c = (dtype(d, target.fp8).name for d in (a, given.b.dtype or a, given.c.dtype or a))
            yield family.problem(Problem(*_SIZES, *matrices(a_, b, c, layout="TN", order=given.b.order)))

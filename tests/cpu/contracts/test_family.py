from dataclasses import replace

import pytest
import torch

from tests.support.nouns import Defaults, Family, Groups, Operands, Problem, Target, each, load_target, registry
from tests.support.plugins import each_with_toy
from tritongemm.core.problem import PLAIN
from tritongemm.formats import make_problem
from tritongemm.numerics.random_inputs import INITS
from tritongemm.numerics.verify import deviation

TOY = "family_toy"
GFX942, GFX950 = map(load_target, ("gfx942", "gfx950"))
# Types of B, for families where it is not A's.
DTYPES_B = {TOY: "int8"}


family = each_with_toy(Family, TOY)


@pytest.fixture
def target(family: Family) -> Target:
    return GFX950 if family.defaults.a.dtype.startswith("fp4") else GFX942


@pytest.fixture
def problem(family: Family, target: Target) -> Problem:
    dtype_b = DTYPES_B.get(family.name, "")
    return make_problem(Defaults.of("", dtype_b, layout="TN", family=family.name, fp8_encoding=target.fp8), 33, 64, 512)


def reference(family: Family, problem: Problem, operands: Operands) -> torch.Tensor:
    return family.reference(problem, {name: tensor.clone() for name, tensor in operands.items()})


def test_it_is_described_and_a_problem_carries_its_scales(family: Family, problem: Problem, target: Target) -> None:
    assert family.summary and "\n" not in family.summary and family.kinds
    assert set(family.variants).isdisjoint(registry.names(Family)), "a variant is another name"
    for name, defaults in family.variants.items():
        assert registry.family_of(name) == (family, defaults)
    assert problem.family == family.name and family.supports(problem, target)
    assert (problem.a.scaling, problem.b.scaling) == family.scalings(problem.a.dtype, problem.b.dtype)[0]
    assert Problem.from_json(problem.to_json()) == problem
    if problem.a.scaling or problem.b.scaling:
        assert "does not have the scales" in family.supports(problem.scaled((None, None)), target).reason
    assert problem.family in problem.key or problem.family == Problem(1, 1, 1).family


@each(("batch", "groups"), [(4, 1), (1, 8)])
def test_what_it_lacks_is_refused(family: Family, problem: Problem, target: Target, batch: int, groups: int) -> None:
    """No reference is made for batches and groups, so no kernel may be tuned for them."""
    several = replace(problem, batch=batch, groups=Groups(groups) if groups > 1 else None)
    if several.kind not in family.kinds:
        refused = family.supports(several, target)
        assert not refused and several.kind in refused.reason


def test_its_operands_are_the_problems_with_b_in_any_order(family: Family, problem: Problem, target: Target) -> None:
    operands = family.make_inputs(problem, "cpu")
    assert set(operands) == {"a", "b", *(e.name for e in problem.extras)}
    assert operands["a"].shape == (problem.m, problem.k // problem.a.type.packed)
    assert operands["b"].shape == (problem.k // problem.b.type.packed, problem.n)
    for extra in problem.extras:
        tensor = operands[extra.name]
        assert tensor.numel() == extra.count and tensor.element_size() == extra.dtype.bytes
    again, other = family.make_inputs(problem, "cpu"), family.make_inputs(problem, "cpu", seed=1)
    assert all(torch.equal(operands[n].view(torch.uint8), again[n].view(torch.uint8)) for n in operands if n != "b")
    assert torch.equal(operands["b"].T.view(torch.uint8), again["b"].T.view(torch.uint8))
    assert not torch.equal(operands["a"].view(torch.uint8), other["a"].view(torch.uint8))
    for defaults in family.variants.values():
        packed = replace(problem, b=problem.b._replace(order=defaults.b.order))
        assert defaults.b.order != PLAIN and family.supports(packed, target)
        exact = reference(family, problem, family.make_inputs(problem, "cpu"))
        assert torch.equal(reference(family, packed, family.make_inputs(packed, "cpu")), exact)


@each("distribution", INITS)
def test_every_distribution_gives_numbers(family: Family, problem: Problem, distribution: str) -> None:
    exact = reference(family, problem, family.make_inputs(problem, "cpu", distribution))
    assert exact.dtype == torch.float64 and exact.shape == (problem.m, problem.n) and exact.isfinite().all()
    assert bool(exact.any()) == (distribution != "zeros")


def test_rounding_passes_and_faults_do_not(family: Family, problem: Problem) -> None:
    """C rounded to its type is within the tolerance; scales left out or mixed up and a lost part of K are not."""
    for one in map(problem.scaled, family.scalings(problem.a.dtype, problem.b.dtype) or [(None, None)]):
        operands = family.make_inputs(one, "cpu")
        exact, tolerance = reference(family, one, operands), family.tolerance(one)
        assert 0 < deviation(exact.to(getattr(torch, one.c.type.torch)), exact) <= tolerance
        assert 0.05 < float(exact.square().mean().sqrt()) < 1e4
        for extra in one.extras:
            factors = operands[extra.name]
            moved = [factors.roll(1, axis) for axis, size in enumerate(factors.shape) if size > 1]
            for wrong in (torch.ones_like(factors), *moved):
                spoiled = operands | {extra.name: wrong}
                assert deviation(reference(family, one, spoiled), exact) > tolerance, (one.key, extra.name)
            if factors.dtype == torch.uint8:
                nan = operands | {extra.name: torch.full_like(factors, 255)}
                assert reference(family, one, nan).isnan().all()
    operands = family.make_inputs(problem, "cpu")
    lost = operands["a"].clone()
    lost[:, -lost.shape[1] // 4 :] = 0
    exact, found = (reference(family, problem, given) for given in (operands, operands | {"a": lost}))
    assert deviation(found, exact) > family.tolerance(problem)

from dataclasses import replace

import pytest
import torch

from tests.support.nouns import Family, Groups, Problem, WeightLayout, load_target, matrices, registry, space
from tests.support.plugins import each_with_toy
from tritongemm.core.problem import PLAIN
from tritongemm.numerics.computable_families import in_fastest_order

TOY = "weight_layout_toy"
GFX942, SM90 = load_target("gfx942"), load_target("sm90")
DTYPES = (torch.int8, torch.uint8, torch.bfloat16, torch.float8_e4m3fnuz, torch.float32)


layout = each_with_toy(WeightLayout, TOY)


@pytest.fixture
def problem(layout: WeightLayout) -> Problem:
    """A product whose weight can be in the order: of bf16, or of four bits."""
    plain = Problem(33, 64, 128, *matrices("bf16", layout="TN", order=layout.name))
    if layout.supports(plain):
        return plain
    return registry.get(Family, "a16w4").problem(replace(plain, b=plain.b._replace(dtype="int4")))


def test_unpacking_undoes_packing(layout: WeightLayout, problem: Problem) -> None:
    """Numbers are moved and nothing else: type, shape and the way it is stored stay."""
    numbers = torch.randint(0, 120, (64, 128), generator=torch.Generator().manual_seed(0))
    packed = problem.b.type.packed
    for dtype in (torch.uint8,) if packed > 1 else DTYPES:
        b = numbers.float().to(dtype).T
        stored = layout.pack(b)
        assert (stored.shape, stored.dtype, stored.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(layout.unpack(stored).double(), b.double())
        assert not torch.equal(stored.double(), b.double()), "an order of its own"
        values = [(t.byte() & 15, t.byte() >> 4) if packed > 1 else (t.double(),) for t in (stored, b)]
        assert torch.equal(*(torch.cat([part.flatten() for part in parts]).sort().values for parts in values))


def test_only_what_divides_is_stored_in_an_order(layout: WeightLayout, problem: Problem) -> None:
    plain = replace(problem, b=problem.b._replace(order=PLAIN))
    for arch in layout.fastest_on:
        assert in_fastest_order(plain, arch) == problem
        assert in_fastest_order(replace(plain, groups=Groups(4)), arch).b == problem.b
        assert in_fastest_order(replace(plain, batch=4), arch).b.order == PLAIN
        assert in_fastest_order(replace(plain, n=problem.n + 1), arch).b.order == PLAIN
    assert in_fastest_order(plain, "gfx942") == plain and layout.supports(problem)
    for wrong in (_divided(problem), replace(problem, b=problem.b._replace(row_major=True))):
        refused = layout.supports(wrong)
        assert not refused and refused.reason


def test_a_family_fills_and_reads_it(layout: WeightLayout, problem: Problem) -> None:
    """The same numbers in another order, the same reference; templates of ours read it where it is one of pieces."""
    family = registry.get(Family, problem.family)
    assert family.supports(problem, GFX942)
    target = SM90 if layout.fragments() else GFX942
    assert bool(space(problem, target).axes) == (layout.pieces(problem.b.type) is not None or layout.apart() > 1)
    assert not family.supports(_divided(problem), GFX942)
    plain = family.make_inputs(replace(problem, b=problem.b._replace(order=PLAIN)), "cpu")
    operands = family.make_inputs(problem, "cpu")
    assert torch.equal(operands["a"], plain["a"]) and torch.equal(operands["b"], layout.pack(plain["b"]))
    assert torch.equal(
        family.reference(problem, operands),
        family.reference(replace(problem, b=problem.b._replace(order=PLAIN)), plain),
    )


def _divided(problem: Problem) -> Problem:
    """A product whose N, or of four bits K, no order divides."""
    return replace(problem, n=63) if problem.b.type.packed == 1 else replace(problem, k=130)

"""Operands with equal rows at several places, and the hash of a row of C."""

from dataclasses import replace

import torch

from tests.support.nouns import Family, Groups, Problem, Support, cases, matrices, registry
from tritongemm.numerics import shared_rows

FP8 = matrices("fp8e4m3fn", "fp8e4m3fn", "bf16", layout="TN")
PROBLEM = Problem(40, 24, 512, *matrices("bf16", layout="TN"), bias="n")


def scaled(family: str, scales: str, dtype: str = "fp8e4m3fn") -> Problem:
    plain = Problem(13, 128, 512, *matrices(dtype, dtype, "bf16", layout="TN"))
    made: Problem = registry.get(Family, family).problem(plain, scales)
    return made


def summed(problem: Problem, runs: int = 1) -> str | Support:
    made = shared_rows.make_operands(problem, "cpu")
    a, b, step = made["a"].float(), made["b"].float(), problem.k // runs
    total = torch.zeros(problem.m, problem.n)
    for run in range(runs):
        part = torch.zeros_like(total)
        for k in range(run * step, (run + 1) * step):  # one after the other, whatever the CPU's own product does
            part += a[:, k : k + 1] * b[k : k + 1]
        total += part
    made["c"].copy_(total + made["bias"].float() if "bias" in made else total)
    return shared_rows.hash_rows(problem, made["c"])


def test_rows_have_one_hash_in_one_order_and_others_are_named() -> None:
    found = {summed(PROBLEM.at(m)) for m in (1, 2, 9, 40)}
    assert len(found) == 1 and len(found | {summed(PROBLEM, runs) for runs in (2, 4, 8)}) == 4
    assert "of its own in the bias" in str(shared_rows.supports(Problem(3, 4, 5, bias="m")))
    assert "in what is added to C" in str(shared_rows.supports(Problem(3, 4, 5, epilogue="add")))
    assert "room of their own" in str(shared_rows.supports(Problem(6, 4, 5, groups=Groups(2, room=3))))
    made = shared_rows.make_operands(PROBLEM, "cpu")
    made["c"].zero_()
    made["c"][-1, 3] = 1
    assert str(shared_rows.hash_rows(PROBLEM, made["c"])) == "equal rows 0 and 39 of a batch of 40 have other bits"
    nan = shared_rows.places(40).index(shared_rows.NAN)
    made["c"].zero_()[nan] = 5  # rows of garbage may be anything
    assert isinstance(shared_rows.hash_rows(PROBLEM, made["c"]), str)


@cases(
    Problem(13, 24, 96, *matrices("fp16", layout="NT")),
    Problem(13, 24, 96, *matrices("bf16", layout="TN"), batch=3), Problem(13, 24, 96, *FP8),
    scaled("a8w8", "row"), scaled("a8w8", "tensor"), scaled("a8w8_blockscale", "block_rows"),
    scaled("a8w8_blockscale", "block_tma"), scaled("a4w4_blockscale", "mx", "fp4e2m1"),
    replace(Problem(13, 24, 96, *matrices("bf16", layout="TN")), groups=Groups(3)),
    replace(scaled("a8w8", "row"), groups=Groups(3)),
    replace(scaled("a8w8_blockscale", "block"), groups=Groups(4, spread="skewed")),
    scaled("a4w4_blockscale", "mx_shuffled", "fp4e2m1"),
)  # fmt: skip
def test_operands_are_in_memory_as_a_problems_own(problem: Problem, /) -> None:
    family = registry.get(Family, problem.family)
    made, usual = shared_rows.make_operands(problem, "cpu"), family.make_inputs(problem, "cpu")
    assert {n: (t.shape, t.stride(), t.dtype) for n, t in made.items() if n != "c"} == {
        n: (t.shape, t.stride(), t.dtype) for n, t in usual.items()
    }
    reference = family.reference(problem, made)
    alike = [place for place, row in enumerate(shared_rows.places(problem.m)) if row == 0]
    # Groups of several heights are multiplied by several products of the CPU's.
    assert len(alike) > 1
    torch.testing.assert_close(
        reference[..., alike, :], reference[..., alike[:1], :].expand_as(reference[..., alike, :]), rtol=0, atol=1e-9
    )
    assert shared_rows.make_operands(problem.at(1), "cpu")["b"].equal(made["b"]) or problem.a.type.is_fp8

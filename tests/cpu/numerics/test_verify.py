import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support.nouns import Family, Problem, cases, each, load_target, matrices, refuses, registry
from tritongemm.core.dtypes import DTYPES
from tritongemm.numerics.random_inputs import INITS
from tritongemm.numerics.verify import VerifyResult, compare, epilogue_reference, library_fault, poison, verify

Run = Callable[[torch.Tensor], None]
DENSE = registry.get(Family, "dense")


def made(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    operands = DENSE.make_inputs(problem, "cpu")
    c = torch.empty((problem.m, problem.n), dtype=getattr(torch, problem.c.type.torch))
    return c, DENSE.reference(problem, operands)


def verified(problem: Problem, spoil: Run = lambda _: None) -> VerifyResult:
    """The decision on the exact result, rounded to C's dtype and then spoiled."""
    c, exact = made(problem)

    def run() -> None:
        c.copy_(exact.to(c.dtype))
        spoil(c)

    return verify(problem, DENSE, run, c, exact)


def put(value: float) -> Run:
    def spoil(c: torch.Tensor) -> None:
        flat = c.view(-1).view(torch.uint8 if c.element_size() == 1 and c.dtype.is_floating_point else c.dtype)
        flat[c.numel() // 2] = flat[c.numel() // 2] + 1 if math.isinf(value) else value

    return spoil


@each("dtype_c", ["fp16", "bf16", "fp32", "fp8e4m3fn", "fp8e4m3fnuz", "fp8e5m2", "fp8e5m2fnuz"])
@each("bias", ["none", "m", "n"])
def test_rounding_passes(dtype_c: str, bias: str) -> None:
    found = verified(Problem(33, 65, 70, *matrices("bf16", c=dtype_c), bias=bias))
    assert found.ok and found.reason == "" and (found.error > 0 or dtype_c == "fp32")


@cases(("bf16", (-600, 600)), ("fp8e4m3fn", (-448, 448)), ("fp8e4m3fnuz", (-240, 240)), ("int8", (-128, 127)))
def test_the_reference_saturates_as_kernels_do(dtype_c: str, ends: tuple[int, int], /) -> None:
    a, b = torch.tensor([[-1.0], [1.0]]).expand(2, 600), torch.ones(600, 1)
    problem = Problem(2, 1, 600, *matrices("int8" if dtype_c == "int8" else "bf16", c=dtype_c))
    assert epilogue_reference(problem, {"a": a, "b": b}).flatten().tolist() == [*ends]


@each("dtype_c", ["int32", "int8"])
def test_integers_are_exact(dtype_c: str) -> None:
    problem = Problem(33, 65, 70, *matrices("int8", c=dtype_c))
    assert (DENSE.tolerance(problem), verified(problem).error) == (0.0, 0.0)
    found = verified(problem, put(math.inf))  # one more than right
    assert not found.ok and found.error > 0, "one unit in one element shows"


@each("name", ["dense", "a8w8", "a8w8_blockscale", "a16w4"])
def test_another_activation_is_no_rounding(name: str) -> None:
    family, b = registry.get(Family, name), {"dense": "bf16", "a16w4": "int4"}.get(name, "fp8e4m3fn")
    a = "bf16" if name == "a16w4" else b
    problem = family.problem(Problem(64, 64, 4096, *matrices(a, b, "bf16", layout="TN"), epilogue="silu"))
    operands = family.make_inputs(problem, "cpu")
    exact = family.reference(problem, operands)
    for other in ("relu", "gelu"):
        found = compare(problem, family, family.reference(replace(problem, epilogue=other), operands), exact)
        assert found.error > 5 * found.tolerance, other


def test_one_wrong_element_in_a_large_matrix() -> None:
    """An error of one standard deviation in one of a million elements is far above rounding."""
    problem = Problem(1024, 1024, 64)
    c, exact = made(problem)
    wrong = float(exact.view(-1)[exact.numel() // 2]) + float(exact.std())
    assert verified(problem).ok
    found = verified(problem, put(wrong))
    assert not found.ok and found.error > 100 * found.tolerance
    assert found.reason == f"error {found.error:.3g} > {found.tolerance:.3g}" and c.shape == (1024, 1024)


@cases(("fp16",) * 3, ("bf16",) * 3, ("fp8e4m3fn", "fp8e4m3fn", "fp8e4m3fn"), ("int8", "int8", "int32"), ("int8",) * 3)
def test_an_element_that_was_not_written(dtypes: tuple[str, str, str], /) -> None:
    """C holds the right answer from before, and one element is not written: the poison shows."""
    problem = Problem(20, 20, 32, *matrices(*dtypes))
    c, exact = made(problem)
    c.copy_(exact.to(c.dtype))
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[19, 19] = False
    right = exact.to(c.dtype)
    # int8 has no NaN; its poison must differ from what is right there, or nothing is to be seen
    assert problem.c.dtype != "int8" or right[19, 19] != -77

    def run() -> None:
        kept = c[19, 19].clone()
        c.copy_(right)
        c[19, 19] = kept

    assert not verify(problem, DENSE, run, c, exact).ok


@each("dtype", ["fp16", "fp32", "fp8e4m3fn", "fp8e5m2fnuz"])
def test_poison_is_nan_where_there_is_one(dtype: str) -> None:
    c = torch.zeros((3, 3), dtype=getattr(torch, DTYPES[dtype].torch))
    poison(c)
    assert c.float().isnan().all()


def test_nan_and_infinity_are_wrong_and_flicker_within_rounding_is_not() -> None:
    problem = Problem(16, 16, 16)
    assert verified(problem, lambda c: c.view(-1)[:1].fill_(math.nan)).error == math.inf
    found = verified(problem, lambda c: c.view(-1)[:1].fill_(math.inf))
    assert not found.ok and found.error > 1e3 and VerifyResult(0.0, 0.0).ok
    assert not VerifyResult(math.inf, 0.1).ok and not VerifyResult(math.nan, 0.1).ok
    problem, calls = Problem(16, 16, 16, *matrices(c="fp8e4m3fn")), []
    c, exact = made(problem)

    def run() -> None:
        calls.append(1)
        c.copy_((exact * (1 + 1e-2 * (len(calls) - 1))).to(c.dtype))

    found = verify(problem, DENSE, run, c, exact)
    assert len(calls) == 2 and found.ok


def test_a_second_run_that_differs() -> None:
    """Counters that the first launch leaves behind spoil the second: both runs count."""
    problem, calls = Problem(16, 16, 16), []
    c, exact = made(problem)

    def run() -> None:
        calls.append(1)
        c.copy_(exact.to(c.dtype) if len(calls) == 1 else torch.zeros_like(c))

    found = verify(problem, DENSE, run, c, exact)
    assert len(calls) == 2 and not found.ok


def test_a_library_may_round_partial_sums_to_the_type_of_c() -> None:
    """As PyTorch lets it; a part of K that is left out is far beyond that."""
    problem = Problem(256, 256, 4096, *matrices("bf16"))
    operands = DENSE.make_inputs(problem, "cpu")
    exact, (a, b) = DENSE.reference(problem, operands), (operands["a"].double(), operands["b"].double())
    parts = [(a[:, k : k + 512] @ b[k : k + 512]).bfloat16() for k in range(0, 4096, 512)]
    rounded = compare(problem, DENSE, functools.reduce(torch.add, parts), exact)
    assert not rounded.ok and not library_fault(problem, rounded)
    short = compare(problem, DENSE, (a[:, 64:] @ b[64:]).bfloat16(), exact)
    assert library_fault(problem, short) == short.reason != ""


@each("row_major_a", [True, False])
@each("row_major_b", [True, False])
def test_operands_have_the_problems_layouts(row_major_a: bool, row_major_b: bool) -> None:
    problem = Problem(5, 6, 7, *matrices(layout="NT"[row_major_a] + "NT"[row_major_b]), bias="m")
    operands = DENSE.make_inputs(problem, "cpu")
    a, b = operands["a"], operands["b"]
    assert (a.shape, b.shape) == ((5, 7), (7, 6)) and operands["bias"].shape == (5,)
    assert a.stride() == ((7, 1) if row_major_a else (1, 5)) and b.stride() == ((6, 1) if row_major_b else (1, 7))
    again = DENSE.make_inputs(problem, "cpu")
    assert torch.equal(a, again["a"]) and not torch.equal(a, DENSE.make_inputs(problem, "cpu", seed=1)["a"])


@each("init", INITS)
def test_inits(init: str) -> None:
    a = DENSE.make_inputs(Problem(64, 64, 64, *matrices("fp32")), "cpu", init)["a"]
    assert a.isfinite().all() and (init == "zeros") == (not a.any())
    if init == "hpl":
        assert a.min() >= -0.5 and a.max() <= 0.5
    refuses(r"--init_type is 'ones'; there are: randn, ", DENSE.make_inputs, Problem(1, 1, 1), "cpu", "ones")


def test_narrow_results_stay_in_range() -> None:
    """Random operands are scaled so that an eight-bit float C seldom saturates, at any K."""
    for k in (1, 64, 4096):
        problem = Problem(64, 64, k, *matrices("fp8e4m3fnuz"))
        exact = made(problem)[1]
        assert exact.abs().max() < problem.c.type.maximum, k
    exact = made(Problem(16, 16, 4096, *matrices("int8")))[1]
    assert (exact.min(), exact.max()) == (-128, 127), "integers saturate"


def test_what_a_target_does_not_run() -> None:
    gfx942, sm90 = load_target("gfx942"), load_target("sm90")
    fn, nuz = "fp8e4m3fn", "fp8e4m3fnuz"
    assert DENSE.supports(Problem(1, 1, 1), gfx942)
    assert DENSE.supports(Problem(1, 1, 1, *matrices(nuz, c="fp16")), gfx942)
    for problem, target, complaint in (
        (
            Problem(1, 1, 1, *matrices(fn, c="fp16")),
            gfx942,
            "gfx942 has no matrix instruction for fp8e4m3fn (A); its fp8 encoding is fnuz",
        ),
        (Problem(1, 1, 1, *matrices(b=nuz)), sm90, "no matrix instruction for fp8e4m3fnuz (B); its fp8 encoding is fn"),
        (Problem(1, 1, 1, *matrices(c=nuz)), sm90, "sm90 does not convert to fp8e4m3fnuz (C)"),
        (Problem(1, 1, 1, *matrices("int8", "fp16", "fp16")), sm90, "int8 times fp16 mixes integers with floats"),
        (
            Problem(1, 1, 128, *matrices("bf16", "int4")),
            sm90,
            "mixes integers with floats; with scales: --family a16w4",
        ),
        (Problem(1, 1, 128, *matrices(fn, "fp4e2m1")), sm90, "no meaning without scales; with scales: --family a8w4"),
        (Problem(1, 1, 1, *matrices("int8", c="fp16")), sm90, "int8 operands need an integer C, not fp16"),
        (Problem(1, 1, 1, *matrices(c="int8")), sm90, "fp16 operands need a C of floats, not int8"),
        (Problem(1, 1, 1, *matrices("int32")), sm90, "int32"),
    ):
        found = DENSE.supports(problem, target)
        assert not found and complaint in found.reason


def test_a_share_of_the_elements_may_be_outside() -> None:
    """--errRatio: as many as it says, counted over all; none of them lost."""
    problem = Problem(16, 64, 32, *matrices("bf16"))
    c, exact = made(problem)

    def outcome(ratio: float, spoil: Run) -> VerifyResult:
        def run() -> None:
            c.copy_(exact.to(c.dtype))
            spoil(c)

        return verify(problem, DENSE, run, c, exact, ratio)

    def off(count: int, by: float) -> Run:
        def spoil(out: torch.Tensor) -> None:
            out.view(-1)[:count] += by * (out.view(-1)[:count].abs() + out.double().square().mean().sqrt())

        return spoil

    few = off(10, 0.1)  # of 1024
    assert not outcome(0.0, few).ok and outcome(0.0, few).outside is None
    found = outcome(0.01, few)
    assert found.ok and found.outside == pytest.approx(10 / 1024) and found.error > found.tolerance
    refused = outcome(0.009, few)
    assert not refused.ok and "in 0.00977 of the elements" in refused.reason
    assert not outcome(0.5, off(1, 0.8)).ok, "one element is lost"
    assert not outcome(0.5, put(math.nan)).ok and outcome(0.01, lambda _: None).outside is None

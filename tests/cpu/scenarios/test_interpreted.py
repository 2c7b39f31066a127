"""Generated kernels in Triton's interpreter: every template, layout and kind of dtype, at odd sizes."""

from dataclasses import replace

import pytest

from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import DESCRIBED, GEMV, GEMV_ROW, GFX942, POINTERS, SM90, SPLIT
from tests.support.nouns import Config, Problem, apart, heavy, load_target, matrices
from tritongemm.codegen import render
from tritongemm.measure.interpreting import reduced

LAYOUTS = [pytest.param(a, b, marks=pytest.mark.heavy if a == b else ()) for a in (True, False) for b in (True, False)]


@pytest.mark.parametrize(("row_a", "row_b"), LAYOUTS)
def test_pointer_templates_at_odd_sizes(interpreted: Interpreted, row_a: bool, row_b: bool) -> None:
    problem = Problem(19, 21, 37, *matrices(layout="NT"[row_a] + "NT"[row_b]), bias="n" if row_a else "m")
    interpreted.check(problem, list(POINTERS), GFX942)


@pytest.mark.parametrize(("dtype", "bias"), [heavy("fp16", "m"), ("int8", "n")])
def test_shared_tiles_are_added_up_in_slices(interpreted: Interpreted, dtype: str, bias: str) -> None:
    problem = Problem(18, 37, 64, *matrices(dtype), bias=bias)
    configs = [c for c in POINTERS if c.split_k > 1 or c.template == "stream_k"]
    few = replace(GFX942, sum_elements=64)
    assert {"tile", "gemv", "stream_k"} == {c.template for c in configs}
    assert all("slice_rows" in render.kernel_source(problem, c.template, few) for c in configs)
    interpreted.check(problem, configs, few)


@pytest.mark.parametrize(("row_a", "row_b"), LAYOUTS)
def test_descriptor_templates_at_odd_sizes(interpreted: Interpreted, row_a: bool, row_b: bool) -> None:
    """Rows have to start at multiples of 16 bytes; everything else may be odd."""
    m, n, k = 19 if row_a else 24, 40, 40 if row_a or not row_b else 39
    problem = Problem(m, n, k, *matrices(layout="NT"[row_a] + "NT"[row_b]), bias="m" if row_b else "none")
    interpreted.check(problem, list(DESCRIBED), SM90)


@apart(
    heavy(("bf16", "bf16", "bf16"), "gfx942"),
    (("fp32", "fp32", "fp32"), "sm90"),
    heavy(("int8", "int8", "int32"), "sm90"),
    (("int8", "int8", "int8"), "gfx942"),
    heavy(("fp8e4m3fnuz", "fp8e5m2fnuz", "fp16"), "gfx942"),
    heavy(("fp8e5m2", "fp8e4m3fn", "fp32"), "gfx950"),
    (("fp8e4m3fn", "fp8e4m3fn", "fp8e4m3fn"), "sm90"),
    heavy(("bf16", "fp16", "bf16"), "gfx942"),
    (("fp16", "fp8e5m2", "fp16"), "sm90"),
)
def test_dtypes(dtypes: tuple[str, str, str], target: str, /, interpreted: Interpreted) -> None:
    problem = Problem(18, 35, 35, *matrices(*dtypes, layout="TN"), bias="n")
    interpreted.check(problem, [SPLIT, GEMV, GEMV_ROW], load_target(target))


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 40, 3), heavy((32, 16, 48))])
def test_sizes_small_and_even(interpreted: Interpreted, size: tuple[int, int, int]) -> None:
    interpreted.check(Problem(*size), list(POINTERS), GFX942)


def test_a_checked_problem_has_the_remainders_of_the_real_one() -> None:
    small = reduced(Problem(4097, 70, 100_003), SPLIT)
    assert (small.m, small.n, small.k) == (2 * 16 + 1, 70, 7 * 16 + 3)
    assert reduced(Problem(3, 4, 5), SPLIT) == Problem(3, 4, 5)
    runs = Config("tile", 16, 32, 64, options=(("pairwise", 1), ("runs", 8)))
    assert reduced(Problem(16, 16, 4096), runs).k % (8 * 64) == 0, "each run has as many blocks as the others"
    gated = Problem(4, 256, 512, *matrices("bf16", layout="TN"), epilogue="silu_mul")
    assert reduced(gated, Config("gemv", 4, 2, 512)).n == 16, "gate and up alternate by 8 columns"

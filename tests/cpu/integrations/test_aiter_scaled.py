"""The names of AITER's functions of products with scales, over `scaled_mm`; signatures beside the real ones."""

import ast
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.scaling import Scaling
from tritongemm.integrations import aiter, aiter_scaled
from tritongemm.numerics import verify
from tritongemm.operations.factors import spread
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, ScaleLayout, WeightLayout

FP8, M, N, K = torch.float8_e4m3fn, 5, 256, 384


def shuffled(w: Tensor) -> Tensor:
    return registry.get(WeightLayout, "shuffled_16x16").pack(w.t()).t()


@each("dtype", [FP8, torch.int8])
def test_a_factor_for_each_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = ((torch.randn(rows, K) * 20).to(dtype) for rows in (M, N))
    of_x, of_w, bias = torch.rand(M, 1), torch.rand(1, N), torch.randn(1, N)
    exact = (x.double() * of_x) @ (w.double() * of_w.T).T
    for result in (aiter.gemm_a8w8(x, w, of_x, of_w), aiter.gemm_a8w8_bpreshuffle(x, shuffled(w), of_x, of_w.T)):
        assert result.dtype == torch.bfloat16 and verify.deviation(result, exact) < 0.01
    biased = aiter.gemm_a8w8_CK(x, w, of_x, of_w, bias, torch.float16, splitK=3)
    assert biased.dtype == torch.float16 and verify.deviation(biased, exact + bias) < 0.01


def test_factors_of_blocks() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(rows, K).to(FP8) for rows in (M, N))
    of_x, of_w = torch.rand(M, K // 128), torch.rand(N // 128, K // 128)
    block = spread(of_w, Scaling(rows=128, depth=128), N, K)
    exact = (x.double() * spread(of_x, Scaling(depth=128), M, K)) @ (w.double() * block).T
    said_row_major = of_x.t().contiguous().view(M, K // 128)
    results = (
        aiter.gemm_a8w8_blockscale(x, w, of_x, of_w),
        aiter.gemm_a8w8_blockscale(x, shuffled(w), said_row_major, of_w, torch.float16, isBpreshuffled=True),
        aiter.gemm_a8w8_blockscale_bpreshuffle(x, shuffled(w), said_row_major, of_w),
        aiter.gemm_a8w8_blockscale_bpreshuffle(x, shuffled(w), of_x.t().contiguous().t(), of_w),
    )
    for result in results:
        assert verify.deviation(result, exact) < 0.01


@each("variant", ["a4w4_blockscale", "a4w4_bpreshuffle"])
def test_fp4(variant: str) -> None:
    family, defaults = registry.family_of(variant)
    one = family.problem(Problem(33, 64, 256, *matrices("fp4e2m1", c="bf16", layout="TN", order=defaults.b.order)))
    operands = registry.get(Family, one.family).make_inputs(one, "cpu")
    exact, out = family.reference(one, operands), torch.full((64, 64), 7.0, dtype=torch.bfloat16)
    padded = torch.zeros(256, operands["scale_a"].shape[1], dtype=torch.uint8)  # as AITER pads them
    padded[: operands["scale_a"].shape[0]] = operands["scale_a"]
    given = operands["a"], operands["b"].t(), padded, operands["scale_b"], out
    assert aiter.gemm_a4w4(*given, bpreshuffle=variant == "a4w4_bpreshuffle") is out
    assert verify.deviation(out[:33], exact) < 0.01 and bool((out[33:] == 7).all())
    with pytest.raises(InputError, match="beta 1"):
        aiter.gemm_a4w4(*given, beta=1.0)
    assert registry.get(ScaleLayout, "e8m0_32x8").unpack(padded).shape == padded.shape
    # Newer AITER gives new memory, for activations of any dimensions, and has a bias in that place.
    bias, shuffles = torch.ones(1, 64), variant == "a4w4_bpreshuffle"
    newer = aiter.gemm_a4w4(given[0].view(3, 11, -1), *given[1:4], bias, dtype=torch.float16, bpreshuffle=shuffles)
    assert newer.shape == (3, 11, 64) and newer.dtype == torch.float16
    assert verify.deviation(newer.view(33, 64), exact + 1) < 0.01
    older = aiter.gemm_a4w4(*given, torch.ones(64), 1.0, 0.0, shuffles)
    assert older is out and verify.deviation(out[:33], exact + 1) < 0.01
    with pytest.raises(InputError, match="apreshuffle True"):
        aiter.gemm_a4w4(*given[:4], apreshuffle=True)


def test_memory_for_one_row_is_distinguished_from_a_bias_or_refused() -> None:
    """In older AITER memory of one row stands where newer has a bias; taken for one, it would stay as it was."""
    q, powers = tritongemm.quantize(torch.randn(33, 64), "mx", torch.uint8)
    a, b, of_b = q[:1], q[1:], tritongemm.pack_scales(powers[1:])
    given = a, b, tritongemm.pack_scales(powers[:1]), of_b
    memory = torch.zeros(1, 32, dtype=torch.bfloat16)
    layer = partial(aiter.gemm_a4w4, *given, bpreshuffle=False)
    with pytest.raises(InputError, match="may be a bias or memory"):
        aiter.gemm_a4w4(*given, memory, bpreshuffle=False)
    assert torch.equal(layer(bias=memory, dtype=torch.bfloat16), layer())
    assert torch.equal(layer(out=memory), layer()) and bool(memory.any())


def _signatures() -> dict[str, list[str]]:
    """Parameters of AITER's functions, read from its files, as importing it needs a GPU."""
    spec = find_spec("aiter")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [Path(f) / "ops" / name for f in folders for name in ("gemm_op_a8w8.py", "gemm_op_a4w4.py")]
    found: dict[str, list[str]] = {}
    for file in (file for file in files if file.is_file()):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [argument.arg for argument in node.args.args]
    return found


def test_parameters_are_aiters() -> None:
    real = _signatures()
    if not real:
        pytest.skip("AITER is not installed")
    for name in ("gemm_a8w8", "gemm_a8w8_CK", "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale", "gemm_a4w4"):
        code = getattr(aiter_scaled, name).__code__
        ours = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert {*real[name]} - {"global_A_scale", "global_B_scale"} <= {*ours}, name


def test_memory_for_blocks_of_a_shuffled_weight() -> None:
    x, w, of_x = torch.randn(M, K).to(FP8), torch.randn(N, K).to(FP8), torch.rand(M, K // 128)
    given = x, shuffled(w), of_x, torch.rand(N // 128, K // 128)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    assert aiter.gemm_a8w8_blockscale_bpreshuffle(*given, out=out) is out
    assert torch.equal(out, aiter.gemm_a8w8_blockscale_bpreshuffle(*given))
    with pytest.raises(InputError, match=r"out is torch.float16"):
        aiter.gemm_a8w8_blockscale_bpreshuffle(*given, out=out.half())


def test_a_weight_that_aiter_shuffled_is_not_read_as_plain() -> None:
    """AITER's own functions look at the mark, or take only such weights."""
    x, w, one = torch.randn(M, K).to(FP8), torch.randn(N, K).to(FP8), torch.ones(1)
    exact = (x.float() @ w.float().T).bfloat16()
    marked = shuffled(w)
    marked.is_shuffled = True
    torch.testing.assert_close(aiter.tgemm.mm(x, marked, scale_a=one, scale_b=one), exact)
    torch.testing.assert_close(aiter.gemm_a8w8_bpreshuffle(x, marked, one, one), exact)
    wide = torch.randn(32, 64)
    wide.is_shuffled = True
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: aiter.gemm_a8w8(x, marked, one, one),
        lambda: aiter.gemm_a8w8_blockscale(x, marked, torch.ones(M, K // 128), torch.ones(N // 128, K // 128)),
        lambda: aiter.gemm_a16w16(torch.randn(2, 64), wide),
    )
    for refused in calls:
        with pytest.raises(InputError, match="is shuffled, and read as it was before"):
            refused()

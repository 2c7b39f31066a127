import ast
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.support.nouns import Family, each, refuses, registry, verify
from tests.support.products import product
from tritongemm.integrations import aiter, aiter_scaled
from tritongemm.integrations.aiter import fused_moe, tgemm
from tritongemm.plugins.contracts import ScaleLayout

FP8, INT8, M, N, K = torch.float8_e4m3fn, torch.int8, 5, 256, 384
X, W, BIAS = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
Q, V, HEADS, WEIGHTS = X.to(FP8), W.to(FP8), X[None].mul(9).to(INT8), W.mul(9).to(INT8)[None]
OF_ROWS, OF_COLUMNS, OF_X, OF_W = torch.rand(M, 1), torch.rand(N, 1), torch.rand(M, 3), torch.rand(2, 3)
TWO, OUT, MEMORY = torch.tensor([2.0]), torch.empty(M, N, dtype=torch.bfloat16), torch.empty(1, M, N)
SHUFFLED, MAJOR = tritongemm.pack_weight(V), OF_X.t().contiguous()  # M-major factors, and as AITER says them
SAID = MAJOR.view(M, 3)
mm, scaled_mm, bmm, scaled_bmm = tritongemm.mm, tritongemm.scaled_mm, tritongemm.bmm, tritongemm.scaled_bmm
by_rows, by_blocks = partial(scaled_mm, Q, V, OF_ROWS, OF_COLUMNS), partial(scaled_mm, Q, V, OF_X, OF_W)
SAME: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "tgemm.mm": (lambda: tgemm.mm(X, W, BIAS), lambda: mm(X, W, BIAS)),
    "tgemm.mm of a factor of A": (
        lambda: tgemm.mm(Q, V, None, torch.float32, TWO), lambda: scaled_mm(Q, V, TWO, TWO / 2, None, torch.float32)
    ),
    "tgemm.mm of a factor of B": (
        lambda: tgemm.mm(Q, V, otype=torch.float32, scale_b=TWO),
        lambda: scaled_mm(Q, V, TWO / 2, TWO, None, torch.float32),
    ),
    "tgemm.mm of both": (lambda: tgemm.mm(Q, V, None, None, TWO, TWO, None), lambda: scaled_mm(Q, V, TWO, TWO)),
    "gemm_a16w16": (
        lambda: aiter.gemm_a16w16(X, W, None, torch.float64), lambda: mm(X, W, None, torch.float64)
    ),
    "gemm_a8w8": (lambda: aiter.gemm_a8w8(Q, V, OF_ROWS, OF_COLUMNS.T), by_rows),
    "gemm_a8w8_bpreshuffle": (lambda: aiter.gemm_a8w8_bpreshuffle(Q, SHUFFLED, OF_ROWS, OF_COLUMNS), by_rows),
    "gemm_a8w8_CK": (
        lambda: aiter.gemm_a8w8_CK(Q, V, OF_ROWS, OF_COLUMNS.T, BIAS[None], torch.float16, splitK=3),
        lambda: by_rows(BIAS, torch.float16),
    ),
    "gemm_a8w8_blockscale": (lambda: aiter.gemm_a8w8_blockscale(Q, V, OF_X, OF_W), by_blocks),
    "gemm_a8w8_blockscale of a shuffled weight": (
        lambda: aiter.gemm_a8w8_blockscale(Q, SHUFFLED, SAID, OF_W, torch.float16, isBpreshuffled=True),
        lambda: by_blocks(out_dtype=torch.float16),
    ),
    "gemm_a8w8_blockscale_bpreshuffle": (
        lambda: aiter.gemm_a8w8_blockscale_bpreshuffle(Q, SHUFFLED, SAID, OF_W, out=OUT), by_blocks
    ),
    "M-major": (lambda: aiter.gemm_a8w8_blockscale_bpreshuffle(Q, SHUFFLED, MAJOR.t(), OF_W), by_blocks),
    "batched_gemm_bf16": (
        lambda: aiter.batched_gemm_bf16(X[None], W[None], MEMORY, BIAS.view(1, 1, N), splitK=2),
        lambda: bmm(X[None], W.T[None], BIAS),
    ),
    "batched_gemm_bf16_CK": (
        lambda: aiter.batched_gemm_bf16_CK(X[None], W[None], BIAS.view(1, 1, N)), lambda: bmm(X[None], W.T[None], BIAS)
    ),
    "batched_gemm_a8w8": (
        lambda: aiter.batched_gemm_a8w8(HEADS, WEIGHTS, OF_ROWS[None], OF_COLUMNS.T[None], OUT[None]),
        lambda: scaled_bmm(HEADS, WEIGHTS.mT, OF_ROWS[None], OF_COLUMNS.T[None]),
    ),
    "batched_gemm_a8w8_CK": (
        lambda: aiter.batched_gemm_a8w8_CK(HEADS, WEIGHTS, OF_ROWS[None], OF_COLUMNS.T[None]),
        lambda: scaled_bmm(HEADS, WEIGHTS.mT, OF_ROWS[None], OF_COLUMNS.T[None]),
    ),
    "batched_gemm_a8w8_blockscale": (
        lambda: aiter.batched_gemm_a8w8_blockscale(HEADS, WEIGHTS, OF_X[None], OF_W[None], MEMORY),
        lambda: scaled_bmm(HEADS, WEIGHTS.mT, OF_X[None], OF_W.mT[None], None, torch.float32),
    ),
}  # fmt: skip


@each("name", SAME)
def test_they_compute_what_ours_do(name: str) -> None:
    """Whose results other tests compare with float64."""
    theirs, ours = (call() for call in SAME[name])
    assert theirs.dtype == ours.dtype and verify.deviation(theirs, ours.double()) < 0.01 and bool(ours.any())
    memory = {OUT.data_ptr(), MEMORY.data_ptr()}
    gives_memory = (name.startswith("batched") and "CK" not in name) or name == "gemm_a8w8_blockscale_bpreshuffle"
    assert (theirs.data_ptr() in memory) == gives_memory


def test_results_are_not_scaled_and_parameters_are_aiters() -> None:
    refuses(r"^scale_c: results are not scaled", tgemm.mm, Q, V, scale_a=TWO, scale_c=TWO)
    real = _signatures()
    if not real:
        pytest.skip("AITER is not installed")
    for name in ("gemm_a8w8", "gemm_a8w8_CK", "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale", "gemm_a4w4"):
        code = getattr(aiter_scaled, name).__code__
        ours = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        assert {*real[name]} - {"global_A_scale", "global_B_scale"} <= {*ours}, name


def test_a_mixture_with_aiters_further_arguments() -> None:
    torch.manual_seed(0)
    x, weights, ids = torch.randn(4, 128), torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    w1, w2 = (torch.randn(3, rows, 128).to(torch.float8_e4m3fn) for rows in (256, 128))
    of_w1, of_w2 = torch.rand(3, 256), torch.rand(3, 128)
    given = x, w1, w2, weights, ids
    layer: Callable[..., Tensor] = partial(fused_moe, *given)
    wanted = tritongemm.fused_moe(*given, "silu", of_w1, of_w2)
    says_nothing = {"a1_scale": None, "splitk": 2, "hidden_pad": 0, "gate_mode": "separated", "dtype": torch.float32}
    named = {"w1_scale": of_w1[..., None], "w2_scale": of_w2[..., None]}
    assert torch.equal(layer(**named, **says_nothing), wanted)
    one = torch.rand(3, 1)
    wide = one.expand(3, 256).contiguous(), one.expand(3, 128).contiguous()
    for of_expert in (one[:, 0], one, one[..., None]):
        assert torch.equal(layer(w1_scale=of_expert, w2_scale=of_expert), tritongemm.fused_moe(*given, "silu", *wide))
    others: tuple[dict[str, Any], ...] = ({"a1_scale": TWO}, {"bias1": BIAS}, {"dtype": torch.half}, {"hidden_pad": 8})
    for other in others:
        refuses(f"{next(iter(other))} is not served", layer, **named, **other)
    w1.is_shuffled = True
    refuses("w1 is shuffled", layer, **named)


class Activation(IntEnum):
    """As a Python enumeration of AITER's would be; its members print as their numbers."""

    Silu = 0
    Gelu = 1


def test_a_mixture_is_called_as_aiter_calls_its_own() -> None:
    torch.manual_seed(0)
    given = torch.randn(4, 128), torch.randn(3, 256, 128), torch.randn(3, 128, 128), torch.rand(4, 2)
    ids = torch.randint(0, 3, (4, 2))
    wanted = tritongemm.fused_moe(*given, ids, "gelu")
    after: tuple[Any, ...] = (None, 0, False, None, None, None, None, None, None, 0, torch.float32, 0, 0, None, None)
    assert torch.equal(fused_moe(*given, ids, activation="ActivationType.Gelu"), wanted)
    refuses("doweight_stage1", fused_moe, *given, ids, doweight_stage1=True)
    for activation in (Activation.Gelu, 1, "gelu"):
        assert torch.equal(fused_moe(*given, ids, None, activation, *after[1:]), wanted)
    refuses("bias2 is not served", fused_moe, *given, ids, None, 1, *after[1:-1], torch.ones(3, 128))
    refuses("activation is '2'", fused_moe, *given, ids, None, 2)
    with pytest.raises(TypeError, match="22 arguments are given; AITER's fused_moe has 21"):
        fused_moe(*given, ids, None, 1, *after[1:], None)


def test_powers_of_two_of_one_group_along_k_are_no_factors_of_rows() -> None:
    w1, w2 = torch.randn(3, 64, 32).to(torch.float8_e4m3fn), torch.randn(3, 32, 32).to(torch.float8_e4m3fn)
    given = torch.randn(4, 32), w1, w2, torch.rand(4, 2), torch.randint(0, 3, (4, 2))
    powers = [torch.full((3, w.shape[1], 1), 120, dtype=torch.uint8) for w in (w1, w2)]
    found = fused_moe(*given, w1_scale=powers[0], w2_scale=powers[1])
    assert torch.equal(found, tritongemm.fused_moe(*given, "silu", *powers))


@each("variant", ["a4w4_blockscale", "a4w4_bpreshuffle"])
def test_fp4(variant: str) -> None:
    family, defaults = registry.family_of(variant)
    one = product(family.name, 33, 64, 256, "fp4e2m1", order=defaults.b.order)
    operands = registry.get(Family, one.family).make_inputs(one, "cpu")
    exact, out = family.reference(one, operands), torch.full((64, 64), 7.0, dtype=torch.bfloat16)
    padded = torch.zeros(256, operands["scale_a"].shape[1], dtype=torch.uint8)  # as AITER pads them
    padded[: operands["scale_a"].shape[0]] = operands["scale_a"]
    given = operands["a"], operands["b"].t(), padded, operands["scale_b"], out
    assert aiter.gemm_a4w4(*given, bpreshuffle=variant == "a4w4_bpreshuffle") is out
    assert verify.deviation(out[:33], exact) < 0.01 and bool((out[33:] == 7).all())
    refuses("beta 1", aiter.gemm_a4w4, *given, beta=1.0)
    assert registry.get(ScaleLayout, "e8m0_32x8").unpack(padded).shape == padded.shape
    # Newer AITER gives new memory, for activations of any dimensions, and has a bias in that place.
    bias, shuffles = torch.ones(1, 64), variant == "a4w4_bpreshuffle"
    newer = aiter.gemm_a4w4(given[0].view(3, 11, -1), *given[1:4], bias, dtype=torch.float16, bpreshuffle=shuffles)
    assert newer.shape == (3, 11, 64) and newer.dtype == torch.float16
    assert verify.deviation(newer.view(33, 64), exact + 1) < 0.01
    older = aiter.gemm_a4w4(*given, torch.ones(64), 1.0, 0.0, shuffles)
    assert older is out and verify.deviation(out[:33], exact + 1) < 0.01
    refuses("apreshuffle True", aiter.gemm_a4w4, *given[:4], apreshuffle=True)


def test_memory_for_one_row_is_distinguished_from_a_bias_or_refused() -> None:
    """In older AITER memory of one row stands where newer has a bias; taken for one, it would stay as it was."""
    q, powers = tritongemm.quantize(torch.randn(33, 64), "mx", torch.uint8)
    a, b, of_b = q[:1], q[1:], tritongemm.pack_scales(powers[1:])
    given = a, b, tritongemm.pack_scales(powers[:1]), of_b
    memory = torch.zeros(1, 32, dtype=torch.bfloat16)
    layer = partial(aiter.gemm_a4w4, *given, bpreshuffle=False)
    refuses("may be a bias or memory", aiter.gemm_a4w4, *given, memory, bpreshuffle=False)
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


def test_a_weight_that_aiter_shuffled_is_not_read_as_plain() -> None:
    """AITER's own functions look at the mark, or take only such weights."""
    one, marked = torch.ones(1), SHUFFLED.clone()
    marked.is_shuffled = True
    exact = scaled_mm(Q, V, one, one)
    assert torch.equal(aiter.tgemm.mm(Q, marked, scale_a=one, scale_b=one), exact)
    assert torch.equal(aiter.gemm_a8w8_bpreshuffle(Q, marked, one, one), exact)
    wide = torch.randn(32, 64)
    wide.is_shuffled = True
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: aiter.gemm_a8w8(Q, marked, one, one),
        lambda: aiter.gemm_a8w8_blockscale(Q, marked, OF_X, OF_W),
        lambda: aiter.gemm_a16w16(torch.randn(2, 64), wide),
    )
    for refused in calls:
        refuses("is shuffled, and read as it was before", refused)

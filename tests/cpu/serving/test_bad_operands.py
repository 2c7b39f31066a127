"""What every public product refuses, one table over all of them: an error that names the operand, before any launch.

Values are looked at on a CPU; on a GPU by `check_scales`, where a program asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.kernel_cases import GFX942
from tests.support.linear_layers import attach_device, run_on_cpu
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter
from tritongemm.operations.checks import check_encodings
from tritongemm.serving.dispatcher import Dispatcher

B, M, N, K, GROUPS, TOKENS, HIDDEN, INNER = 2, 16, 32, 256, 4, 5, 128, 256
FP8, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
ONE = torch.ones
NAN, INF = float("nan"), float("inf")


def q(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.full(shape, 1.0).to(dtype)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def with_pitch(rows: int, columns: int, pitch: int) -> Tensor:
    """Factors M-major whose columns are so far apart, as a copy engine could not have them."""
    return torch.empty_strided((rows, columns), (1, pitch)).fill_(1.0)


E8M0 = {"scale_a": torch.full((M, 8), 127, dtype=torch.uint8), "scale_b": torch.full((N, 8), 127, dtype=torch.uint8)}
OFFS = ends(4, 4, 10, 16)
IDS = torch.zeros(TOKENS, 2, dtype=torch.int64)
BYTES = {"A": torch.zeros(M, K, dtype=torch.uint8), "B": torch.zeros(N, K, dtype=torch.uint8)}
BYTES |= {name: torch.full((256, 16), 127, dtype=torch.uint8) for name in ("A_scale", "B_scale")}

# A call of each that is right; then what is changed in it, and what the error says.
Case = tuple[dict[str, Any], str]
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Case]]] = {
    "scaled_mm": (
        tritongemm.scaled_mm,
        {"a": q(M, K), "b": q(N, K), "scale_a": ONE(M, 2), "scale_b": ONE(1, 2)},
        {
            "shape": ({"scale_a": ONE(M, 3)}, "scale_a is"),
            "strides": ({"scale_a": ONE(M, 4)[:, ::2]}, r"strides \(4, 2\)"),
            "pitch": ({"scale_a": with_pitch(M, 2, M + 1)}, r"strides \(1, 17\)"),
            "dtype": ({"scale_a": ONE(M, 2).double()}, "scale_a is torch.float64"),
            "nan": ({"scale_a": ONE(M, 2) * NAN}, "scale_a holds NaN or infinity"),
            "inf": ({"scale_b": ONE(1, 2) * INF}, "scale_b holds NaN or infinity"),
            "e8m0 nan": (E8M0 | {"scale_a": E8M0["scale_a"] + 128}, "scale_a holds NaN or infinity"),
            "no columns": ({"b": q(0, K), "scale_b": ONE(0, 2)}, "is empty"),
            "types": ({"b": q(N, K, dtype=INT8)}, "int8 is multiplied by int8"),
            "no tensor": ({"scale_a": 1.0}, "scale_a must be a tensor"),
            "fp4 by fp8": ({"b": torch.zeros(N, K, dtype=torch.uint8)}, "fp4 is multiplied by fp4"),
            "fp8 by fp4": ({"a": torch.zeros(M, K, dtype=torch.uint8)}, "fp4 is multiplied by fp4"),
            "elsewhere": ({"scale_b": ONE(1, 2, device="meta")}, "scale_b is on meta"),
            "bias": ({"bias": q(N)}, "bias is torch.float8_e4m3fn; it may be"),
            "b shape": ({"b": q(N, K - 1)}, r"b is \(.*\) with strides"),
            "wide": ({"a": ONE(M, K)}, "a is torch.float32; scaled products take fp8, int8 or fp4"),
            "bias size": ({"bias": ONE(N - 1)}, "bias is"),
            "result": ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
            "no order": ({"order_b": "backwards"}, "no weight layout is called 'backwards'"),
            "no layout": ({"scale_layout": "upside_down"}, "no scale layout is called"),
            "order": ({"b": q(N + 8, K), "scale_b": ONE(1, 2), "order_b": "shuffled_16x16"}, "N a multiple of 16"),
        },
    ),
    "bmm": (
        tritongemm.bmm,
        {"a": torch.ones(B, M, K), "b": torch.ones(B, K, N)},
        {
            "two dimensions": ({"a": torch.ones(M, K)}, "must be"),
            "batches": ({"b": torch.ones(3, K, N)}, "must be"),
            "bias": ({"bias": ONE(N + 1)}, "bias is"),
            "out": ({"out": torch.empty(B, M, N + 1)}, "out is"),
            "elsewhere": ({"b": torch.ones(B, K, N, device="meta")}, "b is on meta"),
            "bias of eight bits": ({"bias": q(N)}, "bias is torch.float8_e4m3fn"),
            "bias of rows": ({"bias": ONE(B, N, 1)}, r"bias is torch.float32 \(2, 32, 1\)"),
            "one place": ({"out": torch.empty(1, M, N).expand(B, M, N)}, "several numbers would share one place"),
            "gradient": ({"out": torch.empty(B, M, N, requires_grad=True)}, "a gradient is wanted"),
            "bias elsewhere": ({"bias": ONE(N, device="meta")}, "bias is on meta"),
            "sparse": ({"a": torch.ones(B, M, K).to_sparse()}, "a is torch.sparse_coo"),
            "no tensor": ({"a": "x"}, "a must be a tensor"),
        },
    ),
    "scaled_bmm": (
        tritongemm.scaled_bmm,
        {"a": q(B, M, K), "b": q(B, K, N), "scale_a": ONE(B, M), "scale_b": ONE(B, N)},
        {
            "shape": ({"scale_a": ONE(B, M + 1)}, "scale_a is"),
            "dtype": ({"scale_a": ONE(B, M).half()}, "scale_a is torch.float16"),
            "nan": ({"scale_a": ONE(B, M) * NAN}, "scale_a holds NaN"),
            "inf": ({"scale_b": ONE(B, N) * INF}, "scale_b holds NaN or infinity"),
            "operand": ({"a": torch.ones(B, M, K)}, "a is torch.float32; scaled products take fp8 or int8"),
            "types": ({"b": q(B, K, N, dtype=INT8)}, "int8 is multiplied by int8"),
            "result": ({"out_dtype": INT8}, "out_dtype is torch.int8"),
            "elsewhere": ({"scale_a": ONE(B, M, device="meta")}, "scale_a is on meta"),
            "one of two": ({"scale_b": None}, "go together"),
            "none": ({"scale_a": None, "scale_b": None}, "must be tensors"),
            "no tensor": ({"scale_a": 1.0}, "scale_a must be a tensor"),
        },
    ),
    "scaled_bmm along K": (
        tritongemm.scaled_bmm,
        {"a": q(B, M, K), "b": q(B, K, N), "scale_a": ONE(B, M, 2), "scale_b": ONE(B, 2, N)},
        {
            "groups": ({"scale_a": ONE(B, M, 3)}, r"scale_a is .*\(16, 2\)"),
            "rows": ({"scale_a": ONE(B, M + 1, 2)}, "scale_a is"),
            "one row": ({"a": q(B, 1, K), "scale_a": ONE(B, 1, 4)[..., ::2]}, r"of each product it .* \(1, 2\)"),
            "batch": ({"scale_a": ONE(B + 1, M, 2)}, "scale_a is"),
            "not turned": ({"scale_b": ONE(B, N, 2)}, r"scale_b is .*\(2, "),
            "strides": ({"scale_a": ONE(B, M, 4)[..., ::2]}, "with strides"),
            "dtype": ({"scale_b": ONE(B, 2, N).half()}, "scale_b is torch.float16"),
            "nan": ({"scale_a": ONE(B, M, 2) * NAN}, "scale_a holds NaN"),
            "inf": ({"scale_b": ONE(B, 2, N) * INF}, "scale_b holds NaN or infinity"),
            "elsewhere": ({"scale_b": ONE(B, 2, N, device="meta")}, "scale_b is on meta"),
            "one of two": ({"scale_b": None}, "go together"),
        },
    ),
    "grouped_mm": (
        tritongemm.grouped_mm,
        {"a": torch.ones(M, K), "b": torch.ones(GROUPS, K, N), "offs": OFFS},
        {
            "too few": ({"offs": OFFS[:3]}, "offs must be int32"),
            "descending": ({"offs": OFFS.flip(0)}, "ascending"),
            "too many rows": ({"offs": OFFS + 1}, "up to 16"),
            "negative": ({"offs": OFFS - 5}, "ascending"),
            "long": ({"offs": OFFS.long()}, "offs must be int32"),
            "room": ({"a": torch.ones(GROUPS, 8, K)}, "the rows of each group, 0 to 8"),
            "no groups": ({"b": torch.ones(0, K, N), "offs": OFFS[:0]}, "is empty"),
            "types": ({"b": torch.ones(GROUPS, K, N).half()}, "without scale factors they are of one type"),
            "sparse": ({"a": torch.ones(M, K).to_sparse()}, "a is torch.sparse_coo"),
            "no tensor": ({"a": 3}, "a must be a tensor"),
            "nothing": ({"a": None}, "a must be a tensor, not NoneType"),
            "no rows of groups": ({"offs": None}, "offs must be a tensor"),
        },
    ),
    "grouped_mm with scales": (
        tritongemm.grouped_mm,
        {"a": q(M, K), "b": q(GROUPS, N, K).mT, "offs": OFFS, "scale_a": ONE(M, 2), "scale_b": ONE(GROUPS, 1, 2)},
        {
            "shape": ({"scale_a": ONE(M, 3)}, "scale_a must be float32"),
            "forms": ({"scale_a": ONE(M)}, "scale_a must be float32"),
            "shape of b": ({"scale_b": ONE(1, GROUPS, 1, 2)}, "scale_b must be float32"),
            "rows of b": ({"scale_a": ONE(M, 1), "scale_b": ONE(GROUPS, N, 1)}, r"scale_b must be float32 \(4, 1, 2\)"),
            "dtype": ({"scale_a": ONE(M, 2).half()}, "scale_a must be float32"),
            "nan": ({"scale_a": ONE(M, 2) * NAN}, "scale_a holds NaN"),
            "inf": ({"scale_b": ONE(GROUPS, 1, 2) * INF}, "scale_b holds NaN or infinity"),
            "operand": ({"a": torch.ones(M, K)}, "scaled products take fp8 or int8"),
            "types": ({"b": q(GROUPS, N, K, dtype=INT8).mT}, "int8 is multiplied by int8"),
            "result": ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
            "elsewhere": ({"scale_a": ONE(M, 2, device="meta")}, "scale_a is on meta"),
        },
    ),
    "fused_moe": (
        tritongemm.fused_moe,
        {
            "x": torch.ones(TOKENS, HIDDEN), "w1": q(GROUPS, 2 * INNER, HIDDEN), "w2": q(GROUPS, HIDDEN, INNER),
            "topk_weights": ONE(TOKENS, 2), "topk_ids": IDS, "w1_scale": ONE(GROUPS, 4, 1),
            "w2_scale": ONE(GROUPS, 1, 2),
        },
        {
            "ids": ({"topk_ids": IDS.float()}, "topk_ids must be int32"),
            "weights": ({"topk_weights": IDS}, "topk_weights must be floats"),
            "shape of weights": ({"topk_weights": ONE(TOKENS, 3)}, "topk_weights"),
            "none chosen": ({"topk_ids": IDS[:, :0], "topk_weights": ONE(TOKENS, 0)}, "0 of 4 experts"),
            "tokens": ({"x": torch.ones(TOKENS, HIDDEN).int()}, "x must be bfloat16"),
            "no inner": ({"w1": q(GROUPS, 0, HIDDEN), "w2": q(GROUPS, HIDDEN, 0)}, r"w1 \(4, 0, 128\) is empty"),
            "odd w1": ({"w1": q(GROUPS, 2 * INNER + 1, HIDDEN)}, "wants a w2"),
            "shape": ({"w1_scale": ONE(GROUPS, 3, 1)}, "w1_scale must be float32"),
            "shape of w2": ({"w2_scale": ONE(GROUPS, 2, 2)}, "w2_scale must be float32"),
            "rows": ({"w1_scale": ONE(4, 512, 1), "w2_scale": ONE(4, HIDDEN, 1)}, r"must be float32 \(4, 4, 1\)"),
            "dtype": ({"w1_scale": ONE(GROUPS, 4, 1).half()}, "w1_scale must be float32"),
            "nan": ({"w1_scale": ONE(GROUPS, 4, 1) * NAN}, "w1_scale holds NaN"),
            "inf": ({"w2_scale": ONE(GROUPS, 1, 2) * INF}, "w2_scale holds NaN or infinity"),
            "one of two": ({"w2_scale": None}, "both with scale factors or both without"),
            "no scales": ({"w1_scale": None, "w2_scale": None}, "without scale factors they are of one type"),
            "types": ({"w2": q(GROUPS, HIDDEN, INNER, dtype=FNUZ)}, "of one type"),
            "elsewhere": ({"w1_scale": ONE(GROUPS, 4, 1, device="meta")}, "w1_scale is on meta"),
            "no tensor": ({"w1_scale": 1.0}, "must be a tensor|of one type"),
            "activation": ({"activation": "relu"}, "silu, gelu"),
        },
    ),
    "gemm_a8w8": (
        aiter.gemm_a8w8,
        {"XQ": q(M, K), "WQ": q(N, K), "x_scale": ONE(M, 1), "w_scale": ONE(1, N)},
        {
            "shape": ({"x_scale": ONE(M + 1, 1)}, "scale_a is"),
            "shape of b": ({"w_scale": ONE(2, N)}, "w_scale is"),
            "nan": ({"x_scale": ONE(M, 1) * NAN}, "holds NaN"),
            "bias": ({"bias": ONE(N + 1)}, "bias is"),
            "no bias": ({"bias": 1.0}, "bias must be a tensor"),
            "no tensor": ({"w_scale": 1.0}, "w_scale must be a tensor"),
        },
    ),
    "gemm_a8w8_bpreshuffle": (
        aiter.gemm_a8w8_bpreshuffle,
        {"XQ": q(M, K), "WQ": q(N, K), "x_scale": ONE(M, 1), "w_scale": ONE(N)},
        {
            "odd N": ({"WQ": q(N + 3, K), "w_scale": ONE(N + 3)}, "N a multiple of 16"),
            "dtype": ({"x_scale": ONE(M, 1).half()}, "scale_a is torch.float16"),
        },
    ),
    "gemm_a8w8_blockscale": (
        aiter.gemm_a8w8_blockscale,
        {"XQ": q(M, K), "WQ": q(N, K), "x_scale": ONE(M, 2), "w_scale": ONE(1, 2)},
        {
            "shape": ({"x_scale": ONE(M, 3)}, "scale_a is"),
            "inf": ({"w_scale": ONE(1, 2) * INF}, "scale_b holds NaN or infinity"),
            "one dimension": ({"x_scale": ONE(M), "isBpreshuffled": True}, "x_scale is"),
        },
    ),
    "gemm_a4w4": (
        aiter.gemm_a4w4,
        BYTES | {"out": torch.empty(M, N, dtype=torch.bfloat16)},
        {
            "few rows": ({"out": torch.empty(M - 1, N, dtype=torch.bfloat16)}, "out is"),
            "columns": ({"out": torch.empty(M, N + 1, dtype=torch.bfloat16)}, "out is"),
            "factors": ({"A_scale": ONE(M, 2)}, "scale_a is torch.float32"),
            "alpha": ({"alpha": 2.0}, "alpha is 2.0"),
            "no tensor": ({"B_scale": None}, "B_scale must be a tensor"),
        },
    ),
    "batched_gemm_bf16": (
        aiter.batched_gemm_bf16,
        {"XQ": torch.ones(B, M, K), "WQ": torch.ones(B, N, K), "out": torch.empty(B, M, N)},
        {
            "out": ({"out": torch.empty(B, M, N + 1)}, "out is"),
            "two dimensions": ({"WQ": torch.ones(N, K)}, "WQ is"),
            "no memory": ({"out": None}, "out must be a tensor"),
        },
    ),
    "batched_gemm_a8w8_blockscale": (
        aiter.batched_gemm_a8w8_blockscale,
        {
            "XQ": q(B, M, K), "WQ": q(B, N, K), "x_scale": ONE(B, M, 2), "w_scale": ONE(B, 1, 2),
            "Y": torch.empty(B, M, N, dtype=torch.bfloat16),
        },
        {
            "one dimension": ({"w_scale": ONE(2)}, "w_scale is"),
            "no tensor": ({"w_scale": 1.0}, "w_scale must be a tensor"),
            "no memory": ({"Y": None}, "Y must be a tensor"),
        },
    ),
    "tgemm.mm": (
        aiter.tgemm.mm,
        {"inp": q(M, K), "weights": q(N, K), "scale_a": ONE(1), "scale_b": ONE(1)},
        {"no tensor": ({"inp": None}, "A must be a tensor"), "nan": ({"scale_b": ONE(1) * NAN}, "holds NaN")},
    ),
    "quantize": (
        lambda **given: tritongemm.quantize(**given)[1],
        {"x": torch.ones(M, K)},
        {
            "no tensor": ({"x": None}, "x must be a tensor"),
            "sparse": ({"x": torch.ones(M, K).to_sparse()}, "x is torch.sparse_coo"),
            "integers": ({"x": torch.ones(M, K).int()}, "x is torch.int32"),
        },
    ),
    "linear_fp8": (
        tritongemm.linear_fp8,
        {"x": torch.ones(M, K), "weight": q(N, K), "weight_scale": ONE(1, 2)},
        {
            "no tensor": ({"x": None}, "x must be a tensor"),
            "no weight": ({"weight": [1.0]}, "weight must be a tensor"),
            "unquantized": ({"unquantized": 2.0}, "unquantized must be a tensor"),
            "no factors": ({"weight_scale": 2.0}, "weight_scale must be a tensor"),
            "nan": ({"weight_scale": ONE(1, 2) * NAN}, "weight_scale holds NaN"),
        },
    ),
    "pack_scales": (
        tritongemm.pack_scales, {"scales": E8M0["scale_a"]}, {"no tensor": ({"scales": 1}, "scales must be a tensor")},
    ),
    "pack_weight": (
        lambda w: tritongemm.pack_weight(w).float(), {"w": q(N, K)}, {"no tensor": ({"w": 1}, "w must be a tensor")},
    ),
    "batched_gemm_a8w8": (
        aiter.batched_gemm_a8w8_CK,
        {"XQ": q(B, M, K), "WQ": q(B, N, K), "x_scale": ONE(B, M, 1), "w_scale": ONE(B, 1, N)},
        {
            "shape": ({"w_scale": ONE(B, 1, N + 1)}, "scale_b is"),
            "nan": ({"x_scale": ONE(B, M, 1) * NAN}, "scale_a holds NaN"),
        },
    ),
    "aiter.fused_moe": (
        aiter.fused_moe,
        {
            "hidden_states": torch.ones(TOKENS, HIDDEN), "w1": torch.ones(GROUPS, 2 * INNER, HIDDEN),
            "w2": torch.ones(GROUPS, HIDDEN, INNER), "topk_weight": ONE(TOKENS, 2), "topk_ids": IDS,
        },
        {
            "activation": ({"activation": "ActivationType.Swiglu"}, "silu, gelu"),
            "mask": ({"expert_mask": IDS}, "not served"),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_wrong_operand_is_named(name: str) -> None:
    call, right, wrong = CALLS[name]
    assert bool(torch.isfinite(call(**right)).all()), "whatever was right before helps nothing"
    for case, (changes, says) in wrong.items():
        with pytest.raises((InputError, TypeError), match=says):
            call(**(right | changes))
            pytest.fail(f"{name}: {case} was taken")


def test_no_rows_are_no_error_where_groups_and_batches_may_have_none() -> None:
    """A router may give an expert nothing, and a step no token at all."""
    weights = torch.ones(GROUPS, K, N)
    assert tritongemm.grouped_mm(torch.ones(0, K), weights, ends(0, 0, 0, 0)).shape == (0, N)
    assert tritongemm.grouped_mm(torch.ones(M, K), weights, ends(0, M, M, M)).shape == (M, N)
    assert tritongemm.bmm(torch.ones(B, 0, K), torch.ones(B, K, N)).shape == (B, 0, N)
    w1, w2 = torch.ones(GROUPS, 2 * INNER, HIDDEN), torch.ones(GROUPS, HIDDEN, INNER)
    assert tritongemm.fused_moe(torch.ones(0, HIDDEN), w1, w2, ONE(0, 2), IDS[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("factors", "dtype"),
    [
        *itertools.product((ONE(1), ONE(N), ONE(1, 2)), (torch.float8_e4m3fn, torch.int8)),
        (torch.full((N, K // 32), 127, dtype=torch.uint8), torch.float8_e4m3fn),
    ],
)
def test_activations_that_are_no_numbers_make_their_row_of_a_layer_nan(
    value: float, factors: torch.Tensor, dtype: torch.dtype
) -> None:
    """As on a GPU, where no program waits to look at them: one token must not end the batch of a server."""
    x = torch.ones(M, K)
    x[1, 5] = value
    found = tritongemm.linear_fp8(x, q(N, K).to(dtype), factors)
    assert bool(found[1].isnan().all()) and bool(found[0].isfinite().all()) and bool(found[2:].isfinite().all())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("form", ["none", "row", "block"])
def test_tokens_that_are_no_numbers_make_their_own_result_nan(value: float, form: str) -> None:
    x = torch.ones(TOKENS, HIDDEN)
    x[1, 5] = value
    given = CALLS["fused_moe"][1] | {"x": x}
    if form == "none":
        given |= {name: given[name].float() for name in ("w1", "w2")} | {"w1_scale": None, "w2_scale": None}
    elif form == "row":
        given |= {"w1_scale": ONE(GROUPS, 2 * INNER), "w2_scale": ONE(GROUPS, HIDDEN)}
    finite = tritongemm.fused_moe(**given).isfinite()
    assert not finite[1].any() and finite[0].all() and finite[2:].all()


def test_values_are_looked_at_where_a_program_asks() -> None:
    tritongemm.check_scales(scale_a=ONE(3), scale_b=E8M0["scale_b"])
    for wrong in (ONE(3) * NAN, ONE(3) * -INF, E8M0["scale_a"] + 128):
        with pytest.raises(InputError, match="scale_b holds NaN or infinity"):
            tritongemm.check_scales(scale_a=ONE(3), scale_b=wrong)
    with pytest.raises(InputError, match="scale_a is on meta"):
        tritongemm.check_scales(scale_a=ONE(3, device="meta"))
    with pytest.raises(InputError, match=r"scale_a is torch\.float16"):
        tritongemm.check_scales(scale_a=ONE(3).half())


def test_another_targets_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of an sm90 would read other numbers; PyTorch has no product of them there either."""
    run_on_cpu(monkeypatch)
    dispatcher = Dispatcher()
    attach_device(dispatcher)
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    says = r"a is float8_e4m3fnuz; the fp8 encoding of sm90 is fn: quantise to that"
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=FNUZ, device="cuda:0") for shape in ((B, M, K), (B, K, N)))
        with pytest.raises(InputError, match=says):
            tritongemm.explain("bmm", a, b)
        rows = torch.empty(M, K, dtype=FNUZ, device="cuda:0")
        offs = torch.empty(B, dtype=torch.int32, device="cuda:0")
        factors = torch.empty(M, device="cuda:0"), torch.empty(B, N, device="cuda:0")
        with pytest.raises(InputError, match=says):
            tritongemm.explain(tritongemm.grouped_mm, rows, b, offs, *factors)


def test_powers_of_two_are_read_in_ocps_encoding_by_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gfx942 multiplies them as wider numbers; with float32 factors it has no such product of that encoding."""
    run_on_cpu(monkeypatch)
    kernels = attach_device(Dispatcher())
    monkeypatch.setattr(type(kernels), "target", property(lambda self: GFX942))
    operands = {"a": q(M, K), "b": q(N, K)}
    check_encodings(operands | {"scale_a": E8M0["scale_a"]}, lambda: kernels.target)
    for factors in ({}, {"scale_a": ONE(M, 2)}):
        with pytest.raises(InputError, match="a is float8_e4m3fn; the fp8 encoding of gfx942 is fnuz"):
            check_encodings(operands | factors, lambda: kernels.target)

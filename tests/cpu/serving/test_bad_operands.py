"""What every public product refuses, one table over all of them: an error that names the operand, before any launch.

Values are looked at on a CPU; on a GPU by `check_scales`, where a program asks for it.
"""

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.kernel_cases import GFX942
from tests.support.linear_layers import attach_device, run_on_cpu
from tests.support.operation_calls import CALLS, GROUPS, SHUFFLED_SCALES, B, Call, K, N, Rows
from tests.support.refusals import refuses
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter
from tritongemm.operations.checks import check_encodings
from tritongemm.serving.dispatcher import Dispatcher

M = 16
FP8, FNUZ, INT8, BF16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.bfloat16
ONE, NAN, INF, ANY = torch.ones, float("nan"), float("inf"), None
R = Rows(M, wide=torch.float32)
q, p, i = R.q, R.p, R.i
OFFS, IDS = torch.tensor([4, 10, 16], dtype=torch.int32), torch.zeros(M, 2, dtype=torch.int64)


def meta(*shape: int) -> Tensor:
    return ONE(shape, device="meta")


def csr(*shape: int) -> Tensor:
    return ONE(shape).to_sparse_csr()


def coo(*shape: int) -> Tensor:
    return ONE(shape).to_sparse()


def nested(*shape: int) -> Tensor:
    return torch.nested.nested_tensor([ONE(shape), ONE(shape)])


def out(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def check_scales(**given: Tensor) -> Tensor:
    tritongemm.check_scales(**given)
    return given["scale_b"]


def shuffled(w: Tensor) -> Tensor:
    w = w.clone()
    w.is_shuffled = True
    return w


OTHERS = {
    "aiter.fused_moe": Call(
        aiter.fused_moe, hidden_states=R.x(M, K), w1=q(GROUPS, 2 * N, K), w2=q(GROUPS, K, N), topk_weight=R.f(M, 2),
        topk_ids=IDS, w1_scale=ONE(GROUPS, 2 * N), w2_scale=ONE(GROUPS, K),
    ),
    "linear_fp8": Call(tritongemm.linear_fp8, R.x(M, K), q(N, K), ONE(1, 2)),
    "pack_scales": Call(tritongemm.pack_scales, p(M, 8)),
    "pack_weight": Call(lambda w: tritongemm.pack_weight(w).float(), q(N, K)),
    "quantize": Call(lambda **given: tritongemm.quantize(**given)[1], x=R.x(M, K)),
    "act_quantize": Call(lambda **given: tritongemm.linear_act_quantize(**given)[1], x=R.x(M, K), w=R.x(N, K), act=""),
    "check_scales": Call(check_scales, scale_b=ONE(3)),
    "gemm_a4w4 plain": Call(aiter.gemm_a4w4, p(M, K // 2), p(N, K // 2), p(256, 8), p(N, 8), bpreshuffle=False),
    "tgemm.mm": Call(aiter.tgemm.mm, q(M, K), q(N, K), scale_a=ONE(1), scale_b=ONE(1)),
}  # fmt: skip
# What is changed in a call that is right, by its name in the table of all calls or above, and what the error says.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mm": [
        ({"x": [1.0]}, "x must be a tensor, not list"),
        ({"w": 3}, "w must be a tensor, not int"),
        ({"x": None}, "x must be a tensor, not NoneType"),
        ({"w": None}, "w must be a tensor, not NoneType"),
        ({"bias": "x"}, "bias must be a tensor, not str"),
        ({"out_dtype": [1]}, r"out_dtype is \[1\]; give a dtype"),
        ({"w": ONE(N, K) * 1j}, "the operands are torch.float32 and torch.complex64"),
        ({"x": ONE(M, K).to(INT8), "w": ONE(N, K) / 2}, "the operands are torch.int8 and torch.float32"),
        ({"x": ONE(M, K).int(), "w": ONE(N, K) / 2}, "the operands are torch.int32 and torch.float32"),
    ],
    "linear_act": [({"act": ONE(2)}, "act is a tensor; give a string"), ({"out_dtype": ONE(2)}, "out_dtype is a")],
    "act_quantize": [({"act": ONE(2)}, "act is a tensor"), ({"dtype": "x"}, "dtype is 'x'; give a dtype")],
    "scaled_mm blocks": [
        ({"scale_layout": ONE(2)}, "scale_layout is a tensor"), ({"order_b": [1]}, r"order_b is \[1\]; give a string"),
        ({"scale_a": ONE(M, 3)}, "scale_a is"),
        ({"scale_a": ONE(M, 4)[:, ::2]}, r"strides \(4, 2\)"),
        ({"scale_a": torch.empty_strided((M, 2), (1, M + 1)).fill_(1.0)}, r"strides \(1, 17\)"),
        ({"scale_a": ONE(M, 2).double()}, "scale_a is torch.float64"),
        ({"scale_a": ONE(M, 2) * NAN}, "scale_a holds NaN or infinity"),
        ({"scale_b": ONE(1, 2) * INF}, "scale_b holds NaN or infinity"),
        ({"scale_b": torch.nn.Parameter(ONE(N) * NAN, requires_grad=False), "scale_a": ONE(M)}, "scale_b holds NaN"),
        ({"scale_a": p(M, 8) | 255, "scale_b": p(N, 8)}, "scale_a holds NaN or infinity"),
        ({"b": q(0, K), "scale_b": ONE(0, 2)}, "is empty"),
        ({"b": i(N, K)}, "int8 is multiplied by int8"),
        ({"scale_a": 1.0}, "scale_a must be a tensor"),
        ({"b": p(N, K)}, "fp4 is multiplied by fp4"),
        ({"a": p(M, K)}, "fp4 is multiplied by fp4"),
        ({"scale_b": meta(1, 2)}, "scale_b is on meta"),
        ({"bias": q(N)}, "bias is torch.float8_e4m3fn; it may be"),
        ({"b": q(N, K - 1)}, r"b is \(.*\) with strides"),
        ({"a": ONE(M, K)}, "a is torch.float32; scaled products take fp8, int8 or fp4"),
        ({"bias": ONE(N - 1)}, "bias is"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
        ({"order_b": "backwards"}, "no weight layout is called 'backwards'"),
        ({"scale_layout": "upside_down"}, "no scale layout is called"),
        ({"b": q(N + 8, K), "scale_b": ONE(2, 2), "order_b": "shuffled_16x16"}, "N a multiple of 16"),
    ],
    "scaled_mm rows": [
        ({"b": csr(N, K)}, "b is torch.sparse_csr"),
        ({"scale_a": csr(M, 1)}, "scale_a is torch.sparse_csr"),
        ({"scale_a": nested(M)}, "scale_a is nested"),
        ({"bias": nested(N)}, "bias is nested"),
        ({"bias": torch.full((N,), 1j)}, "bias is torch.complex64"),
        ({"bias": coo(N)}, "bias is torch.sparse"),
    ],
    "scaled_mm fp4": [
        ({"scale_a": p(M, 8)}, r"scale_a is .* it may be \(32, 8\) in e8m0 .* in the layout e8m0_32x8"),
    ],
    "bmm": [
        ({"a": ONE(M, K)}, "must be"),
        ({"b": ONE(3, K, N)}, "must be"),
        ({"bias": ONE(N + 1)}, "bias is"),
        ({"out": ONE(B, M, N + 1)}, "out is"),
        ({"b": meta(B, K, N)}, "b is on meta"),
        ({"bias": q(N)}, "bias is torch.float8_e4m3fn"),
        ({"bias": ONE(B, N, 1)}, r"bias is torch.float32 \(2, 128, 1\)"),
        ({"out": ONE(1, M, N).expand(B, M, N)}, "several numbers would share one place"),
        ({"out": torch.empty(B, M, N, requires_grad=True)}, "a gradient is wanted"),
        ({"bias": meta(N)}, "bias is on meta"),
        ({"a": coo(B, M, K)}, "a is torch.sparse_coo"),
        ({"a": csr(B, M, K)}, "a is torch.sparse_csr"),
        ({"out": csr(B, M, N)}, "out is torch.sparse_csr"),
        ({"a": "x"}, "a must be a tensor"),
        ({"out_dtype": "x"}, "out_dtype is 'x'; give a dtype"),
        ({"b": ONE(B, K, N) * 1j, "bias": None}, "the operands are torch.float32 and torch.complex64"),
    ],
    "scaled_bmm rows": [
        ({"scale_a": ONE(B, M + 1)}, "scale_a is"),
        ({"scale_a": ONE(B, M).half()}, "scale_a is torch.float16"),
        ({"scale_a": ONE(B, M) * NAN}, "scale_a holds NaN"),
        ({"scale_b": ONE(B, N) * INF}, "scale_b holds NaN or infinity"),
        ({"a": ONE(B, M, K)}, "a is torch.float32; scaled products take fp8 or int8"),
        ({"b": i(B, K, N)}, "int8 is multiplied by int8"),
        ({"out_dtype": INT8}, "out_dtype is torch.int8"),
        ({"scale_a": meta(B, M)}, "scale_a is on meta"),
        ({"scale_b": None}, "go together"),
        ({"scale_a": None, "scale_b": None}, "must be tensors"),
        ({"scale_a": 1.0}, "scale_a must be a tensor"),
        ({"scale_a": csr(B, M)}, "scale_a is torch.sparse_csr"),
        ({"scale_b": nested(B)}, "scale_b is nested"),
        ({"scale_a": ONE(B, 7)}, r"strides \(7, 1\); of each product it may be one for .* \(16, 8\) in e8m0"),
    ],
    "scaled_bmm blocks": [
        ({"scale_a": ONE(B, M, 3)}, r"scale_a is .*\(16, 2\)"),
        ({"scale_a": ONE(B, M + 1, 2)}, "scale_a is"),
        ({"a": q(B, 1, K), "scale_a": ONE(B, 1, 4)[..., ::2]}, r"of each product it .* \(1, 2\)"),
        ({"scale_a": ONE(B + 1, M, 2)}, "scale_a is"),
        ({"scale_b": ONE(B, N, 2)}, r"scale_b is .*\(2, "),
        ({"scale_a": ONE(B, M, 4)[..., ::2]}, "with strides"),
        ({"scale_b": ONE(B, 2, N).half()}, "scale_b is torch.float16"),
        ({"scale_a": ONE(B, M, 2) * NAN}, "scale_a holds NaN"),
        ({"scale_b": ONE(B, 2, N) * INF}, "scale_b holds NaN or infinity"),
        ({"scale_b": meta(B, 2, N)}, "scale_b is on meta"),
        ({"scale_b": None}, "go together"),
    ],
    "scaled_bmm mx": [
        ({"scale_layout": "spiral"}, "no scale layout is called 'spiral'; there are: e8m0_32x8"),
        ({"scale_layout": SHUFFLED_SCALES}, r"scale_a is torch\.uint8"),
        ({"b": q(B, K, 33), "scale_a": p(B, 32, 8), "scale_b": p(B, 8, 33), "scale_layout": SHUFFLED_SCALES},
         r"scale_b is .* it may be \(8, 64\) in e8m0 .* in the layout e8m0_32x8"),
    ],
    "grouped_mm": [
        ({"scale_layout": ONE(2)}, "scale_layout is a tensor"), ({"offs": OFFS[:2]}, "offs must be int32"),
        ({"offs": OFFS.flip(0)}, "ascending"),
        ({"offs": OFFS + 1}, "up to 16"),
        ({"offs": OFFS - 5}, "ascending"),
        ({"offs": OFFS.long()}, "offs must be int32"),
        ({"a": ONE(GROUPS, 8, K)}, "the rows of each group, 0 to 8"),
        ({"b": ONE(0, K, N), "offs": OFFS[:0]}, "is empty"),
        ({"b": ONE(GROUPS, K, N).half()}, "without scale factors they are of one type"),
        ({"a": coo(M, K)}, "a is torch.sparse_coo"),
        ({"a": csr(M, K)}, "a is torch.sparse_csr"),
        ({"a": 3}, "a must be a tensor"),
        ({"a": None}, "a must be a tensor, not NoneType"),
        ({"offs": None}, "offs must be a tensor"),
        ({"scale_layout": SHUFFLED_SCALES}, "it is of factors that are powers of two"),
    ],
    "grouped_mm blocks": [
        ({"scale_a": ONE(M, 3)}, "scale_a must be float32"),
        ({"scale_a": ONE(M)}, "scale_a must be float32"),
        ({"scale_b": ONE(1, GROUPS, 1, 2)}, "scale_b must be float32"),
        ({"scale_a": ONE(M, 1), "scale_b": ONE(GROUPS, N, 1)}, r"scale_b must be float32 \(3, 1, 2\)"),
        ({"scale_a": ONE(M, 2).half()}, "scale_a must be float32"),
        ({"scale_a": q(M)}, "scale_a must be float32"),
        ({"scale_a": ONE(M, 2) * NAN}, "scale_a holds NaN"),
        ({"scale_b": ONE(GROUPS, 1, 2) * INF}, "scale_b holds NaN or infinity"),
        ({"a": ONE(M, K)}, "scaled products take fp8 or int8"),
        ({"b": i(GROUPS, N, K).mT}, "int8 is multiplied by int8"),
        ({"out_dtype": torch.int32}, "out_dtype is torch.int32"),
        ({"scale_a": meta(M, 2)}, "scale_a is on meta"),
        ({"scale_a": coo(M)}, "scale_a is torch.sparse_coo"),
        ({"scale_a": nested(M)}, "scale_a is nested"),
    ],
    "grouped_mm mx": [
        ({"scale_a": p(M, 8), "scale_b": p(GROUPS, N, 7), "scale_layout": ""}, r"scale_b must be e8m0 \(3, 128, 8\)"),
        ({"scale_a": p(M, 7), "scale_layout": ""}, r"scale_a must be e8m0 \(16, 8\), not torch.uint8 \(16, 7\)"),
        ({"scale_layout": "spiral"}, "no scale layout is called 'spiral'"),
        ({"scale_a": p(32, 8) | 255}, "scale_a holds NaN"),
    ],
    "fused_moe rows": [
        ({"keep_activations": ONE(2)}, "keep_activations is a tensor; give True or False"),
        ({"topk_ids": IDS.float()}, "topk_ids must be int32"),
        ({"topk_ids": IDS[:3]}, "topk_ids"),
        ({"topk_weights": IDS}, "topk_weights must be floats"),
        ({"topk_weights": ONE(M, 3)}, "topk_weights"),
        ({"topk_ids": IDS[:, :0], "topk_weights": ONE(M, 0)}, "0 of 3 experts"),
        ({"x": ONE(M, K).int()}, "x must be bfloat16"),
        ({"x": nested(M, K)}, "x is nested"),
        ({"w1": q(GROUPS, 0, K), "w2": q(GROUPS, K, 0)}, r"w1 \(3, 0, 256\) is empty"),
        ({"w1": q(GROUPS, 2 * N + 1, K)}, "wants a w2"),
        ({"w1_scale": ONE(GROUPS, 3, 2), "w2_scale": ONE(GROUPS, 2, 1)}, "w1_scale must be float32"),
        ({"w1_scale": ONE(GROUPS, 2, 2), "w2_scale": ONE(GROUPS, 3, 1)}, "w2_scale must be float32"),
        ({"w1_scale": ONE(3, 256, 1), "w2_scale": ONE(3, K, 1)}, r"must be float32 \(3, 2, 2\)"),
        ({"w1_scale": ONE(GROUPS, 2 * N).half()}, "w1_scale must be float32"),
        ({"w1_scale": ONE(GROUPS, 2 * N) * NAN}, "w1_scale holds NaN"),
        ({"w2_scale": ONE(GROUPS, K) * INF}, "w2_scale holds NaN or infinity"),
        ({"w2_scale": None}, "both with scale factors or both without"),
        ({"w1_scale": None, "w2_scale": None}, "without scale factors they are of one type"),
        ({"w2": q(GROUPS, K, N, dtype=FNUZ)}, "of one type"),
        ({"w1_scale": meta(GROUPS, 2 * N)}, "w1_scale is on meta"),
        ({"w1_scale": 1.0}, "must be a tensor|of one type"),
        ({"w1_scale": 1.0, "scale_layout": SHUFFLED_SCALES}, "w1_scale must be a tensor, not float"),
        ({"activation": "relu"}, "silu, gelu"),
    ],
    "fused_moe int8": [
        ({"w1_scale": ONE(3, 1, 1), "w2_scale": ONE(3, 1, 1)}, r"of int8 weights it is of rows, float32 \(3, 256\)"),
        ({"w1_scale": None, "w2_scale": None}, r"x is torch.float32, w1 is torch.int8: without scale factors"),
    ],
    "gemm_a8w8": [
        ({"x_scale": ONE(M + 1, 1)}, "scale_a is"),
        ({"w_scale": ONE(2, N)}, "w_scale is"),
        ({"x_scale": ONE(M, 1) * NAN}, "holds NaN"),
        ({"bias": ONE(N + 1)}, "bias is"),
        ({"bias": ONE(2, N // 2)}, r"bias is \(2, 64\)"),
        ({"bias": 1.0}, "bias must be a tensor"),
        ({"w_scale": 1.0}, "w_scale must be a tensor"),
        ({"WQ": q(256, 16384), "XQ": q(M, 16384), "w_scale": ONE(2, 128)}, r"w_scale is \(2, 128\)"),
    ],
    "gemm_a8w8_bpreshuffle": [
        ({"WQ": q(N + 3, K), "w_scale": ONE(N + 3)}, "N a multiple of 16"),
        ({"x_scale": ONE(M, 1).half()}, "scale_a is torch.float16"),
    ],
    "gemm_a8w8_blockscale": [
        ({"x_scale": ONE(M, 3)}, "scale_a is"),
        ({"w_scale": ONE(1, 2) * INF}, "scale_b holds NaN or infinity"),
        ({"x_scale": ONE(M), "isBpreshuffled": True}, "x_scale is"),
    ],
    "gemm_a8w8_blockscale_bpreshuffle": [
        ({"out": meta(M, N).bfloat16()}, "out is on meta, XQ on cpu"),
        ({"out": out(1, N).expand(M, N)}, "several numbers would share one"),
        ({"out": out(M, N + 1)}, r"out is torch.bfloat16 \(16, 129\)"),
    ],
    "gemm_a4w4 plain": [
        ({"out": out(M - 1, N)}, "out is"),
        ({"out": out(M, N + 1)}, "out is"),
        ({"out": meta(M, N).bfloat16()}, "out is on meta, A on cpu"),
        ({"out": out(1, N).expand(M, N)}, "several numbers would share one place"),
        ({"out": out(M, N), "dtype": torch.float16}, r"the result is torch.float16 \(16, 128\)"),
        ({"out": out(M, N).requires_grad_()}, "a gradient is wanted"),
        ({"A_scale": ONE(M, 2)}, "scale_a is torch.float32"),
        ({"alpha": 2.0}, "alpha is 2.0"),
        ({"B_scale": None}, "B_scale must be a tensor"),
        ({"B": shuffled(p(N, K // 2))}, "is shuffled"),
    ],
    "batched_gemm_bf16": [
        ({"out": out(B, M, N + 1)}, "out is"),
        ({"WQ": ONE(N, K)}, "WQ is"),
        ({"out": None}, "out must be a tensor"),
    ],
    "batched_gemm_bf16_CK": [({"WQ": shuffled(ONE(B, N, K))}, "is shuffled")],
    "batched_gemm_a8w8_blockscale": [
        ({"w_scale": ONE(2)}, "w_scale is"),
        ({"w_scale": ONE(2, 0, 2)}, "scale_b is"),
        ({"w_scale": 1.0}, "w_scale must be a tensor"),
        ({"Y": None}, "Y must be a tensor"),
    ],
    "batched_gemm_a8w8_CK": [
        ({"w_scale": ONE(B, 1, N + 1)}, "scale_b is"),
        ({"x_scale": ONE(B, M, 1) * NAN}, "scale_a holds NaN"),
        ({"WQ": shuffled(q(B, N, K))}, "is shuffled"),
    ],
    "tgemm.mm": [({"inp": None}, "A must be a tensor"), ({"scale_b": ONE(1) * NAN}, "holds NaN")],
    "aiter.fused_moe": [
        ({"activation": "ActivationType.Swiglu"}, "silu, gelu"),
        ({"expert_mask": IDS}, "not served"),
        ({"hidden_states": None, "dtype": BF16}, "hidden_states must be a tensor"),
        ({"w1": ONE(3), "w1_scale": ONE(3), "w2_scale": ONE(3)}, r"w1 \(3,\) and w2 \(3, 256, 128\) must be"),
    ],
    "quantize": [
        ({"x": None}, "x must be a tensor"),
        ({"x": coo(M, K)}, "x is torch.sparse_coo"),
        ({"x": ONE(M, K).int()}, "x is torch.int32"),
        ({"x": i(M, K)}, "x is torch.int8"),
        ({"x": ONE(4, 0)}, r"x is torch.float32 \(4, 0\); activations \[..., K\], K not 0, of"),
        ({"granularity": "column"}, "granularity is 'column'; there are: tensor, row, block"),
        ({"layout": "groups"}, "blocks can be in rows, groups, tma"),
        ({"granularity": "block", "layout": "upside"}, "layout is 'upside'"),
        ({"dtype": torch.float16}, "dtype is torch.float16; there are:"),
        ({"dtype": ONE(2)}, "dtype is a tensor; give a dtype"),
        ({"granularity": "mx", "dtype": INT8}, "dtype is torch.int8; with powers of two along K there are: torch.u"),
        ({"granularity": "mx", "dtype": FNUZ}, "with powers of two along K"),
        ({"granularity": "mx", "layout": "tma"}, "powers of two can be in rows, e8m0_32x8"),
        ({"granularity": "mx", "x": ONE(2, 5), "dtype": torch.uint8}, "K even"),
        ({"granularity": "mx", "x": ONE(4, 0)}, "x is torch.float32"),
    ],
    "linear_fp8": [
        ({"x": None}, "x must be a tensor"),
        ({"weight": [1.0]}, "weight must be a tensor"),
        ({"unquantized": 2.0}, "unquantized must be a tensor"),
        ({"weight_scale": 2.0}, "weight_scale must be a tensor"),
        ({"weight_scale": ONE(1, 2) * NAN}, "weight_scale holds NaN"),
        ({"weight_scale": ONE(4, 3)}, r"weight_scale is torch.float32 \(4, 3\)"),
        ({"weight": q(N)}, r"weight is \(128,\)"),
        ({"x": ONE(M, 0)}, r"x is \(16, 0\).*without K"),
        ({"x": ONE(()), "unquantized": ONE(N, K)}, r"x is \(\)"),
        ({"weight_scale": q(N)}, "weight_scale is torch.float8_e4m3fn"),
        ({"weight": q(0, K), "weight_scale": ONE(0)}, r"b \(0, 256\) is empty"),
        ({"weight_scale": p(N, 7)}, "weight_scale is"),
    ],
    "pack_scales": [({"scales": 1}, "scales must be a tensor"), ({"scales": ONE(3, 8)}, "e8m0")],
    "pack_weight": [({"w": 1}, "w must be a tensor")],
    "check_scales": [
        ({"scale_b": ONE(3) * NAN}, "scale_b holds NaN or infinity"),
        ({"scale_b": ONE(3) * -INF}, "scale_b holds NaN or infinity"),
        ({"scale_b": p(M, 8) | 255}, "scale_b holds NaN or infinity"),
        ({"scale_a": meta(3)}, "scale_a is on meta"),
        ({"scale_a": ONE(3).half()}, r"scale_a is torch\.float16"),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_operand_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = OTHERS[name] if name in OTHERS else CALLS[name](R)
    right = inspect.signature(call.function).bind(*call.given, **call.named).arguments
    right |= right.pop("given", {})
    for _ in range(2):  # the second time a call that is kept, where it has been served
        assert bool(torch.isfinite(call().float()).all()), "whatever was right before helps nothing"
    for (changes, says), grad in itertools.product(WRONG[name], (True, False) if name == "mm" else (True,)):
        raised = pytest.raises((InputError, TypeError), match=says)
        with monkeypatch.context() as patch, torch.set_grad_enabled(grad), raised:
            if name.startswith("gemm") and "out" in changes:  # memory is looked at before the product
                patch.setattr(tritongemm, "scaled_mm", lambda *_, **__: pytest.fail("the product was computed"))
            call.function(**(right | changes))
            pytest.fail(f"{name} takes {changes}")


def test_another_targets_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of an sm90 would read other numbers; PyTorch has no product of them there either."""
    run_on_cpu(monkeypatch)
    dispatcher = Dispatcher()
    attach_device(dispatcher)
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    says = r"a is float8_e4m3fnuz; the fp8 encoding of sm90 is fn: quantise to that"
    with FakeTensorMode():
        a, b = (torch.empty(shape, dtype=FNUZ, device="cuda:0") for shape in ((B, M, K), (B, K, N)))
        refuses(says, tritongemm.explain, "bmm", a, b)
        rows = torch.empty(M, K, dtype=FNUZ, device="cuda:0")
        offs = torch.empty(B, dtype=torch.int32, device="cuda:0")
        factors = torch.empty(M, device="cuda:0"), torch.empty(B, N, device="cuda:0")
        refuses(says, tritongemm.explain, tritongemm.grouped_mm, rows, b, offs, *factors)


def test_powers_of_two_are_read_in_ocps_encoding_by_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gfx942 multiplies them as wider numbers; with float32 factors it has no such product of that encoding."""
    run_on_cpu(monkeypatch)
    kernels = attach_device(Dispatcher())
    monkeypatch.setattr(type(kernels), "target", property(lambda self: GFX942))
    operands = {"a": q(M, K), "b": q(N, K)}
    check_encodings(operands | {"scale_a": p(M, 8)}, lambda: kernels.target)
    for factors in ({}, {"scale_a": ONE(M, 2)}):
        with pytest.raises(InputError, match="a is float8_e4m3fn; the fp8 encoding of gfx942 is fnuz"):
            check_encodings(operands | factors, lambda: kernels.target)

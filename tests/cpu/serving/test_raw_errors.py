"""Arguments that once ended in an error of Python or PyTorch are named, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter

M, N, K = 5, 32, 256
ONE, BF16 = torch.ones, torch.bfloat16
ENDS = torch.tensor([2, M], dtype=torch.int32)
CHOSEN = ONE(M, 2), torch.zeros(M, 2, dtype=torch.int64)
NONE: Any = None
NUMBER: Any = 1.0


def q(*shape: int) -> Tensor:
    return ONE(shape).to(torch.float8_e4m3fn)


def csr(*shape: int) -> Tensor:
    return ONE(shape).to_sparse_csr()


def powers(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


def out(*shape: int, device: str = "cpu", dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def nested(*shape: int) -> Tensor:
    return torch.nested.nested_tensor([ONE(shape), ONE(shape)])


BIASES = ONE(N), ONE(N).to_sparse()  # of which the first has the call kept
W1, W2 = q(3, 2 * N, K), q(3, K, N)
FP4 = powers(M, K // 2), powers(N, K // 2), powers(32, 8), powers(32, 8)
BLOCKS = q(M, K), q(N, K), ONE(M, 2), ONE(1, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tritongemm.scaled_mm(q(M, K), csr(N, K), ONE(M), ONE(N)), "b is torch.sparse_csr"),
        (lambda: tritongemm.scaled_mm(q(M, K), q(N, K), csr(M, 1), ONE(N)), "scale_a is torch.sparse_csr"),
        (lambda: tritongemm.bmm(csr(2, M, K), ONE(2, K, N)), "a is torch.sparse_csr"),
        (lambda: tritongemm.bmm(ONE(2, M, K), ONE(2, K, N), out=csr(2, M, N)), "out is torch.sparse_csr"),
        (lambda: tritongemm.scaled_bmm(q(2, M, K), q(2, K, N), csr(2, M), ONE(2, N)), "scale_a is torch.sparse_csr"),
        (
            lambda: tritongemm.grouped_mm(q(M, K), q(2, K, N), ENDS, ONE(M).to_sparse(), ONE(2, N)),
            "scale_a is torch.sparse_coo",
        ),
        (lambda: tritongemm.grouped_mm(csr(M, K), ONE(2, K, N), ENDS), "a is torch.sparse_csr"),
        (
            lambda: tritongemm.fused_moe(
                ONE(M, K), W1, W2, *CHOSEN, "silu", NUMBER, ONE(3, K), scale_layout="e8m0_32x8"
            ),
            "w1_scale must be a tensor, not float",
        ),
        (lambda: tritongemm.patch(NUMBER), "model must be a torch.nn.Module, not float"),
        (lambda: aiter.fused_moe(NONE, W1, W2, *CHOSEN, dtype=BF16), "hidden_states must be a tensor"),
        (
            lambda: aiter.fused_moe(ONE(M, K), ONE(3), W2, *CHOSEN, w1_scale=ONE(3), w2_scale=ONE(3)),
            r"w1 \(3,\) and w2 \(3, 256, 32\) must be",
        ),
        (lambda: tritongemm.linear_fp8(ONE(M, 0), q(N, K), ONE(N)), r"x is \(5, 0\).*without K"),
        (lambda: tritongemm.linear_fp8(ONE(()), q(N, K), ONE(N), None, None, ONE(N, K)), r"x is \(\)"),
        (lambda: tritongemm.linear_fp8(ONE(M, K), q(N, K), q(N)), "weight_scale is torch.float8_e4m3fn"),
        (lambda: tritongemm.grouped_mm(q(M, K), q(2, K, N), ENDS, q(M), ONE(2, N)), "scale_a must be float32"),
        (lambda: tritongemm.scaled_mm(q(M, K), q(N, K), nested(M), ONE(N)), "scale_a is nested"),
        (lambda: tritongemm.scaled_bmm(q(2, M, K), q(2, K, N), ONE(2, M), nested(2)), "scale_b is nested"),
        (lambda: tritongemm.scaled_mm(q(M, K), q(N, K), ONE(M), ONE(N), nested(N)), "bias is nested"),
        (lambda: tritongemm.grouped_mm(q(M, K), q(2, K, N), ENDS, nested(M), ONE(2, N)), "scale_a is nested"),
        (lambda: tritongemm.fused_moe(nested(M, K), W1, W2, *CHOSEN), "x is nested"),
        (
            lambda: tritongemm.scaled_mm(q(M, K), q(N, K), ONE(M), ONE(N), torch.full((N,), 1j)),
            "bias is torch.complex64",
        ),
        (lambda: [tritongemm.scaled_mm(q(M, K), q(N, K), ONE(M), ONE(N), b) for b in BIASES], "bias is torch.sparse"),
    ],
)
def test_it_is_named(call: Callable[[], object], says: str) -> None:
    with pytest.raises((InputError, TypeError), match=says):
        call()


@pytest.mark.parametrize(
    ("call", "given", "says"),
    [
        (aiter.gemm_a8w8_blockscale_bpreshuffle, {"out": out(M, N, device="meta")}, "out is on meta, XQ on cpu"),
        (aiter.gemm_a8w8_blockscale_bpreshuffle, {"out": out(1, N).expand(M, N)}, "several numbers would share one"),
        (aiter.gemm_a8w8_blockscale_bpreshuffle, {"out": out(M, N + 1)}, r"out is torch.bfloat16 \(5, 33\)"),
        (aiter.gemm_a4w4, {"out": out(M, N, device="meta")}, "out is on meta, A on cpu"),
        (aiter.gemm_a4w4, {"out": out(1, N).expand(M, N)}, "several numbers would share one place"),
        (aiter.gemm_a4w4, {"out": out(M, N), "dtype": torch.float16}, r"the result is torch.float16 \(5, 32\)"),
        (aiter.gemm_a4w4, {"out": out(M, N).requires_grad_()}, "a gradient is wanted"),
    ],
)
def test_memory_is_looked_at_before_the_product(
    call: Callable[..., object], given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritongemm, "scaled_mm", lambda *_, **__: pytest.fail("the product was computed"))
    with pytest.raises(InputError, match=says):
        call(*(FP4 if call is aiter.gemm_a4w4 else BLOCKS), **given)

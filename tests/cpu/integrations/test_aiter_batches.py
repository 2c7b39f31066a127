"""AITER's names of batched products, over `bmm`."""

import pytest
import torch

from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter
from tritongemm.numerics import verify


def test_they_compute_what_aiters_do() -> None:
    torch.manual_seed(0)
    x, w, bias = torch.randn(3, 5, 16), torch.randn(3, 8, 16), torch.randn(3, 1, 8)
    wanted, out = torch.einsum("bmk,bnk->bmn", x, w) + bias, torch.empty(3, 5, 8)
    assert aiter.batched_gemm_bf16(x, w, out, bias, splitK=2) is out
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(aiter.batched_gemm_bf16_CK(x, w, bias), wanted)


@each("dtype", [torch.int8, torch.float8_e4m3fnuz])
def test_scales_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(s).mul(9).to(dtype) for s in ((3, 5, 16), (3, 8, 16)))
    scale_x, scale_w = torch.rand(3, 5, 1), torch.rand(3, 1, 8)
    wanted = torch.einsum("bmk,bnk->bmn", x.double(), w.double()) * scale_x * scale_w
    out = torch.empty(3, 5, 8, dtype=torch.bfloat16)
    assert aiter.batched_gemm_a8w8(x, w, scale_x, scale_w, out) is out
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-6)
    assert torch.equal(aiter.batched_gemm_a8w8_CK(x, w, scale_x, scale_w), out)
    with pytest.raises(InputError, match="scale_b is"):
        aiter.batched_gemm_a8w8_CK(x, w, scale_x, scale_w[..., :7])


def test_factors_of_blocks_are_stored_as_aiter_has_them() -> None:
    x, w = (torch.randint(-99, 99, shape, dtype=torch.int8) for shape in ((2, 5, 256), (2, 300, 256)))
    scale_x, scale_w = (torch.randint(-8, 9, shape).float().exp2() for shape in ((2, 5, 2), (2, 3, 2)))
    out = torch.empty(2, 5, 300)
    assert aiter.batched_gemm_a8w8_blockscale(x, w, scale_x, scale_w, out) is out
    wide_x = scale_x.double().repeat_interleave(128, 2)
    wide_w = scale_w.double().repeat_interleave(128, 2).repeat_interleave(128, 1)[:, :300]
    wanted = (x.double() * wide_x) @ (w.double() * wide_w).mT
    assert verify.deviation(out, wanted) < 1e-5
    with pytest.raises(InputError, match="scale_b is"):
        aiter.batched_gemm_a8w8_blockscale(x, w, scale_x, scale_w[:, :2], out)

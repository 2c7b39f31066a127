"""Scale factors whose shape could be read in two ways, or are marked as what they are not, are never misread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations import aiter

FP8 = torch.float8_e4m3fn


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(FP8)


@pytest.mark.parametrize(("n", "k"), [(16, 2048), (64, 8192), (17, 2048)])
def test_factors_of_blocks_are_no_factors_of_rows(n: int, k: int) -> None:
    """[1, K / 128] of a weight that has as many rows."""
    x, w, scale = torch.randn(5, k), fp8(n, k), torch.rand(1, k // 128) + 0.1
    right = x.double() @ (w.double() * scale.double().repeat_interleave(128, 1)).T
    assert (tritongemm.linear_fp8(x, w, scale) - right).norm() < 0.05 * right.norm()


def test_factors_of_blocks_are_not_flattened() -> None:
    a, w, scale = fp8(3, 16384), fp8(256, 16384), torch.ones(2, 128)
    with pytest.raises(InputError, match=r"w_scale is \(2, 128\)"):
        aiter.gemm_a8w8(a, w, torch.ones(3, 1), scale)
    with pytest.raises(InputError, match=r"bias is \(2, 128\)"):
        aiter.gemm_a8w8(a, w, torch.ones(3, 1), torch.ones(256), torch.ones(2, 128))


def _of_four_bits(w: torch.Tensor) -> object:
    scales = torch.full((32, 8), 127, dtype=torch.uint8)
    return aiter.gemm_a4w4(torch.zeros(16, 128, dtype=torch.uint8), w, scales, scales, bpreshuffle=False)


@pytest.mark.parametrize(
    ("weight", "call"),
    [
        (torch.zeros(32, 128, dtype=torch.uint8), _of_four_bits),
        (
            fp8(2, 32, 64),
            lambda w: aiter.batched_gemm_a8w8_CK(fp8(2, 4, 64), w, torch.ones(2, 4, 1), torch.ones(2, 1, 32)),
        ),
        (torch.randn(2, 32, 64), lambda w: aiter.batched_gemm_bf16_CK(torch.randn(2, 4, 64), w)),
    ],
    ids=["a4w4", "batched a8w8", "batched bf16"],
)
def test_shuffled_weights_are_refused_where_plain_ones_are_read(weight: Any, call: Callable[[Any], object]) -> None:
    weight.is_shuffled = True
    with pytest.raises(InputError, match="is shuffled"):
        call(weight)


def test_factors_that_are_parameters_are_looked_at() -> None:
    bad = torch.nn.Parameter(torch.full((8,), torch.nan), requires_grad=False)
    with pytest.raises(InputError, match="scale_b holds NaN"):
        tritongemm.scaled_mm(fp8(4, 256), fp8(8, 256), torch.ones(4), bad)


def test_groups_of_four_bits_may_have_no_rows() -> None:
    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, dtype=torch.uint8)

    ends = torch.zeros(2, dtype=torch.int32)
    assert tritongemm.grouped_mm(codes(0, 64), codes(2, 8, 64).mT, ends, codes(0, 4), codes(2, 8, 4)).shape == (0, 8)

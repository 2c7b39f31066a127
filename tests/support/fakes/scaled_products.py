"""Stand-ins of scaled products that only a GPU has: they check shapes, types and strides as the real ones do."""

from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]

BLOCK = 128


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, output_dtype: torch.dtype
) -> Tensor:
    """`torch.nn.functional.scaled_mm` of PyTorch 2.10 and later for factors of 1 x 128 and of 128 x 128."""
    (m, k), n = a.shape, b.shape[1]
    groups = -(-k // BLOCK)
    assert a.stride() == (k, 1) and b.stride() == (1, k), "row-major A and column-major B"
    assert kind_a.name == "BlockWise1x128"
    _check(scale_a, (m, groups), m)
    if kind_b.name == "BlockWise1x128":
        _check(scale_b, (n, groups), n)
        of_b = scale_b
    else:
        padded = -(-groups // 4) * 4
        _check(scale_b, (padded, -(-n // BLOCK)), padded)
        of_b = scale_b[:groups].T.repeat_interleave(BLOCK, 0)[:n]
    return _product(a, scale_a, b, of_b).to(output_dtype)


def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, **options: Any) -> None:
    """`deep_gemm.fp8_gemm_nt` on Hopper: D = A B^T, A's factors where its copy engine can read them."""
    (left, of_a), (right, of_b) = a, b
    (m, k), n = left.shape, right.shape[0]
    groups = -(-k // BLOCK)
    assert left.stride() == (k, 1) and right.stride() == (k, 1) and d.stride(1) == 1
    assert c is None and d.dtype in (torch.bfloat16, torch.float32)
    assert of_a.shape == (m, groups) and of_a.stride() == (1, -(-m // 4) * 4), "a copy would be part of the call"
    assert of_b.shape == (-(-n // BLOCK), groups) and of_b.is_contiguous()
    d.copy_(_product(left, of_a, right.T, of_b.repeat_interleave(BLOCK, 0)[:n]))


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor) -> None:
    assert a.dtype == b.dtype == torch.bfloat16 and 1 in a.stride() and 1 in b.stride()
    d.copy_(a.float() @ b.float().T)


def m_grouped_fp8_gemm_nt_contiguous(a: Pair, b: Pair, d: Tensor, layout: Tensor, **options: Any) -> None:
    """`deep_gemm`'s product of groups one after another; the first row of every 128 says whose they are."""
    (left, of_a), (right, of_b) = a, b
    assert layout.dtype == torch.int32 and layout.shape == (left.shape[0],) and left.shape[0] % BLOCK == 0
    for first in range(0, left.shape[0], BLOCK):
        group, rows = int(layout[first]), slice(first, first + BLOCK)
        assert group >= 0 and all(int(g) in (group, -1) for g in layout[rows])
        part = torch.empty_strided((BLOCK, of_a.shape[1]), (1, BLOCK)).copy_(of_a[rows])
        assert of_a.stride() == (1, left.shape[0])
        fp8_gemm_nt((left[rows], part), (right[group], of_b[group]), d[rows])


def m_grouped_fp8_gemm_nt_masked(a: Pair, b: Pair, d: Tensor, counts: Tensor, expected_m: int, **options: Any) -> None:
    """`deep_gemm`'s product of groups with equal room."""
    (left, of_a), (right, of_b) = a, b
    groups, room, _ = left.shape
    assert counts.dtype == torch.int32 and counts.shape == (groups,) and expected_m > 0
    assert of_a.stride() == (of_a.shape[2] * (-(-room // 4) * 4), 1, -(-room // 4) * 4)
    for group, rows in enumerate(counts.tolist()):
        part = torch.empty_strided((rows, of_a.shape[2]), (1, -(-rows // 4) * 4)).copy_(of_a[group, :rows])
        fp8_gemm_nt((left[group, :rows], part), (right[group], of_b[group]), d[group, :rows])


def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
    for first in range(0, a.shape[0], BLOCK):
        rows = slice(first, first + BLOCK)
        bf16_gemm_nt(a[rows], b[int(layout[first])], d[rows])


def m_grouped_bf16_gemm_nt_masked(a: Tensor, b: Tensor, d: Tensor, counts: Tensor, expected_m: int) -> None:
    for group, rows in enumerate(counts.tolist()):
        bf16_gemm_nt(a[group, :rows], b[group], d[group, :rows])


def _check(scale: Tensor, shape: tuple[int, int], lead: int) -> None:
    assert scale.dtype == torch.float32 and tuple(scale.shape) == shape, f"{tuple(scale.shape)} is not {shape}"
    assert scale.stride(0) == 1 and (scale.stride(1) == lead or (shape[1] == 1 and scale.stride(1) == 1)), (
        scale.stride()
    )


def _product(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> Tensor:
    k = a.shape[1]
    left = a.double() * of_a.double().repeat_interleave(BLOCK, 1)[:, :k]
    return left @ (b.T.double() * of_b.double().repeat_interleave(BLOCK, 1)[:, :k]).T

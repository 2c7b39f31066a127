"""Provides AITER's functions for batched products, computed by `tritongemm.bmm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.integrations.aiter_scaled import require_plain, require_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _turned(WQ: Tensor, name: str = "WQ") -> Tensor:
    """Return the weights, or their factors along K, with K before N.

    Raises:
        TypeError: they are no tensor.
        InputError: they have not three dimensions, or are in AITER's order.
    """
    require_tensors(**{name: WQ})
    require_plain(**{name: WQ})
    if WQ.dim() != 3:
        raise InputError(f"{name} is {tuple(WQ.shape)}; it is [B, N, K]")
    return WQ.transpose(1, 2)


def batched_gemm_bf16(XQ: Tensor, WQ: Tensor, out: Tensor, bias: Tensor | None = None, splitK: int = 0) -> Tensor:
    """Compute XQ @ WQ.T (+ bias) for each product of a batch, written to `out`.

    Args:
        XQ: [B, M, K].
        WQ: [B, N, K].
        out: [B, M, N].
        bias: [B, 1, N], [B, N], [N] or None.
        splitK: AITER's own; a tuned row says how K is split.

    Raises:
        InputError: as `tritongemm.bmm` says.
    """
    require_tensors(out=out)
    return tritongemm.bmm(XQ, _turned(WQ), bias, out.dtype, out=out)


def batched_gemm_bf16_CK(
    XQ: Tensor, WQ: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, splitK: int | None = None
) -> Tensor:
    """Return the result of `batched_gemm_bf16` in new memory, of XQ's dtype where none is named."""
    return tritongemm.bmm(XQ, _turned(WQ), bias, dtype)


def batched_gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    splitK: int = 0,
) -> Tensor:
    """Compute (XQ @ WQ.T) * x_scale * w_scale (+ bias) for a batch of fp8 or int8, written to `out`.

    Args:
        XQ: [B, M, K].
        WQ: [B, N, K].
        x_scale: a float32 factor for each row of XQ, [B, M, 1].
        w_scale: one for each row of WQ, [B, 1, N].
        out: [B, M, N].
        bias: [B, 1, N], [B, N], [N] or None.
        splitK: AITER's own; a tuned row says how K is split.

    Raises:
        InputError: as `tritongemm.bmm` says.
    """
    require_tensors(out=out)
    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, w_scale, bias, out.dtype, out=out)


def batched_gemm_a8w8_CK(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
) -> Tensor:
    """Return the result of `batched_gemm_a8w8` in new memory, of bfloat16 where no dtype is named."""
    import torch

    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, w_scale, bias, dtype or torch.bfloat16)


def batched_gemm_a8w8_blockscale(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, Y: Tensor) -> Tensor:
    """Compute XQ @ WQ.T for each product of a batch of fp8 with factors along K, written to `Y`.

    Args:
        XQ: [B, M, K].
        WQ: [B, N, K].
        x_scale: a float32 factor for each 128 elements along K of a row, [B, M, K / 128].
        w_scale: one for each 128 x 128, [B, N / 128, K / 128].
        Y: [B, M, N].

    Raises:
        InputError: as `tritongemm.scaled_bmm` says.
    """
    require_tensors(Y=Y)
    of_w = _turned(w_scale, "w_scale")
    return tritongemm.scaled_bmm(XQ, _turned(WQ), x_scale, of_w, None, Y.dtype, out=Y)

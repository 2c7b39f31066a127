"""The names by which AITER's users call products with scales, served by `tritongemm.scaled_mm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tritongemm
from tritongemm.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHUFFLED = "shuffled_16x16"  # the order of AITER's `shuffle_weight`
_SHUFFLED_SCALES = "e8m0_32x8"  # the order of its `e8m0_shuffle`
_SCALE_ROWS = 32  # of a block of those


def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    splitK: int | None = None,
) -> Tensor:
    """(XQ @ WQ.T) * x_scale * w_scale (+ bias), of fp8 or int8 with a factor for each row.

    Args:
        XQ: [M, K].
        WQ: [N, K].
        x_scale: [M, 1], or one factor.
        w_scale: [1, N], [N, 1] or [N], or one factor.
        bias: [N] or [1, N], or None.
        dtype: of the result; bfloat16 by default.
        splitK: AITER's own; a tuned row says how K is split.

    Raises:
        InputError: as `tritongemm.scaled_mm` says.
    """
    return tritongemm.scaled_mm(XQ, WQ, x_scale, _flat(w_scale), _row(bias, dtype), _result(dtype))


gemm_a8w8_CK = gemm_a8w8


def gemm_a8w8_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    check: bool = False,
) -> Tensor:
    """The result of `gemm_a8w8` for a weight in the order of AITER's ``shuffle_weight(…, layout=(16, 16))``."""
    factors = _flat(w_scale)
    return tritongemm.scaled_mm(XQ, WQ, x_scale, factors, _row(bias, dtype), _result(dtype), order_b=_SHUFFLED)


def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype | None = None,
    isBpreshuffled: bool = False,
) -> Tensor:
    """(XQ * x_scale) @ (WQ * w_scale).T, with factors for 1 x 128 and for 128 x 128.

    Args:
        XQ: [M, K].
        WQ: [N, K].
        x_scale: [M, K / 128]; of a shuffled weight as `gemm_a8w8_blockscale_bpreshuffle` takes it.
        w_scale: [N / 128, K / 128].
        dtype: of the result; bfloat16 by default.
        isBpreshuffled: whether the weight is shuffled.

    Raises:
        InputError: as `tritongemm.scaled_mm` says.
    """
    if isBpreshuffled:
        return gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype)
    return tritongemm.scaled_mm(XQ, WQ, x_scale, w_scale, None, _result(dtype))


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """The result of `gemm_a8w8_blockscale` for a shuffled weight.

    AITER keeps the factors of XQ M-major for such weights, in a tensor that says it were [M, K / 128] row-major; here
    it is read so too. One that says by its strides that it is M-major is read as it says.
    """
    _require_matrices(x_scale=x_scale)
    rows, groups = x_scale.shape
    m_major = x_scale.as_strided((rows, groups), (1, rows)) if x_scale.is_contiguous() else x_scale
    return tritongemm.scaled_mm(XQ, WQ, m_major, w_scale, None, _result(dtype), order_b=_SHUFFLED)


def gemm_a4w4(  # noqa: PLR0913 (what AITER has)
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
) -> Tensor:
    """A @ B.T of fp4 with a power of two for each 32 numbers along K, written to `out`.

    Args:
        A: [M, K / 2] bytes.
        B: [N, K / 2] bytes.
        A_scale: e8m0 in the order of AITER's ``e8m0_shuffle``, M padded to at least a multiple of 32.
        B_scale: the same of B.
        out: [M or more, N]; rows beyond M stay as they are.
        bias: [N] or [1, N], or None.
        alpha: 1.
        beta: 0.
        bpreshuffle: whether B is in the order of AITER's ``shuffle_weight``.

    Returns:
        `out`.

    Raises:
        InputError: another alpha or beta; or as `tritongemm.scaled_mm` says.
    """
    if alpha not in (None, 1) or beta not in (None, 0):
        raise InputError(f"alpha is {alpha} and beta {beta}; products are served with 1 and 0")
    _require_matrices(A=A, B=B, A_scale=A_scale, B_scale=B_scale, out=out)
    m, n = A.shape[0], B.shape[0]
    if out.shape[0] < m or out.shape[1] != n:
        raise InputError(f"out is {tuple(out.shape)}; it has {m} or more rows, and {n} columns")
    result = tritongemm.scaled_mm(
        A, B, _whole_blocks(A_scale, m), _whole_blocks(B_scale, n), _row(bias, out.dtype), out.dtype,
        order_b=_SHUFFLED if bpreshuffle else "plain", scale_layout=_SHUFFLED_SCALES,
    )  # fmt: skip
    out[:m].copy_(result)
    return out


def _require_matrices(**operands: Tensor) -> None:
    """Refuse operands that have not two dimensions.

    Raises:
        TypeError: one is no tensor.
        InputError: names it.
    """
    from tritongemm.serving.operand_checks import check_tensors  # which imports torch

    check_tensors(operands)
    for name, tensor in operands.items():
        if tensor.dim() != 2:
            raise InputError(f"{name} is {tuple(tensor.shape)}; it has two dimensions")


def _flat(w_scale: Tensor) -> Tensor:
    """Factors of a weight's rows in one dimension.

    Raises:
        TypeError: it is no tensor.
    """
    from tritongemm.serving.operand_checks import check_tensors

    check_tensors({"w_scale": w_scale})
    return w_scale.reshape(-1)


def _whole_blocks(scales: Tensor, rows: int) -> Tensor:
    """Shuffled factors without the blocks that AITER pads them by."""
    return scales[: -(-rows // _SCALE_ROWS) * _SCALE_ROWS]


def _result(dtype: torch.dtype | None) -> torch.dtype:
    import torch

    return dtype or torch.bfloat16


def _row(bias: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A bias [N] in the type of the result, as kernels read it.

    Raises:
        TypeError: it is no tensor.
    """
    from tritongemm.serving.operand_checks import check_tensors

    if bias is None:
        return None
    check_tensors({"bias": bias})
    return bias.reshape(-1).to(_result(dtype))

"""Provides AITER's functions for products with scales, computed by `tritongemm.scaled_mm`.

Arguments are AITER's own, and errors those of `scaled_mm`. Results are bfloat16 where no dtype is named; how K is split
says a tuned row. Weights in the order of AITER's ``shuffle_weight`` are refused where plain ones are read.
"""

import torch
from torch import Tensor

import tritongemm
from tritongemm.core.errors import InputError
from tritongemm.core.integers import round_up
from tritongemm.operations.checks import check_memory, check_tensors

SHUFFLED = "shuffled_16x16"  # the order of AITER's `shuffle_weight`
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
    """Compute (XQ @ WQ.T) * x_scale * w_scale (+ bias), of fp8 or int8 with a factor for each row, or one for all."""
    require_plain(WQ=WQ)
    return tritongemm.scaled_mm(XQ, WQ, x_scale, _one_row("w_scale", w_scale), _row(bias, dtype), _result(dtype))


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
    """Return the result of `gemm_a8w8` for a weight in the order of AITER's ``shuffle_weight(…, layout=(16, 16))``."""
    factors = _one_row("w_scale", w_scale)
    return tritongemm.scaled_mm(XQ, WQ, x_scale, factors, _row(bias, dtype), _result(dtype), order_b=SHUFFLED)


def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype | None = None,
    isBpreshuffled: bool = False,
) -> Tensor:
    """Compute (XQ * x_scale) @ (WQ * w_scale).T, with factors for 1 x 128 and for 128 x 128."""
    if isBpreshuffled:
        return gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype)
    require_plain(WQ=WQ)
    return tritongemm.scaled_mm(XQ, WQ, x_scale, w_scale, None, _result(dtype))


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the result of `gemm_a8w8_blockscale` for a shuffled weight.

    AITER keeps the factors of XQ M-major for such weights, in a tensor that says it were [M, K / 128] row-major; here
    it is read so too. One that says by its strides that it is M-major is read as it says. The result is written to
    `out`, [M, N] of `dtype`, where that is given.
    """
    _require_matrices(x_scale=x_scale)
    rows, groups = x_scale.shape
    if out is not None:
        _require_matrices(XQ=XQ, WQ=WQ, out=out)
        shape = XQ.shape[0], WQ.shape[0]
        _check_memory(out, shape, _result(dtype), XQ=XQ, WQ=WQ, x_scale=x_scale, w_scale=w_scale)
    m_major = x_scale.as_strided((rows, groups), (1, rows)) if x_scale.is_contiguous() else x_scale
    result = tritongemm.scaled_mm(XQ, WQ, m_major, w_scale, None, _result(dtype), order_b=SHUFFLED)
    return result if out is None else out.copy_(result)


def gemm_a4w4(  # noqa: PLR0913 (what AITER has)
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    alpha: float | None = 1.0,
    beta: float | None = 0.0,
    bpreshuffle: bool | None = True,
    apreshuffle: bool | None = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute A @ B.T of fp4 with a power of two for each 32 numbers along K.

    Older AITER has `out` and `bias` where newer has `bias` and `dtype`: 16 bits with M rows or more are that.
    A tensor of one row may be either, and is refused without a `dtype`: give a bias as [N], and memory by name.

    Args:
        A: [..., K / 2] bytes, M rows in all.
        B: [N, K / 2] bytes.
        A_scale: e8m0 in the order of AITER's ``e8m0_shuffle``, M padded to at least a multiple of 32.
        B_scale: the same of B.
        bias: [N] or [1, N], or None.
        dtype: of the result; that of `out`, or bfloat16.
        alpha: 1.
        beta: 0.
        bpreshuffle: whether B is in the order of AITER's ``shuffle_weight``.
        apreshuffle: False.
        out: None, or [M or more, N], which the result is written to; rows beyond M stay as they are.

    Returns:
        [..., N], or `out`.

    Raises:
        TypeError: an operand is no tensor.
        InputError: another alpha or beta, or a shuffled A; or as `tritongemm.scaled_mm` says.
    """
    if alpha not in (None, 1) or beta not in (None, 0) or apreshuffle:
        raise InputError(f"alpha is {alpha}, beta {beta}, apreshuffle {apreshuffle}; served are 1, 0 and False")
    _require_matrices(B=B, A_scale=A_scale, B_scale=B_scale)
    require_tensors(A=A)
    if not bpreshuffle:
        require_plain(B=B)
    m, n = A.numel() // max(1, A.shape[-1]) if A.dim() else 0, B.shape[0]
    if out is None and _is_memory(bias, m, dtype):
        bias, dtype, out = dtype, None, bias  # the order of older versions of AITER
    if out is not None:
        _require_matrices(A=A, out=out)
        if out.shape[0] < m or out.shape[1] != n:
            raise InputError(f"out is {tuple(out.shape)}; it has {m} or more rows, and {n} columns")
        dtype = dtype or out.dtype
        _check_memory(out, (out.shape[0], n), dtype, A=A, B=B, A_scale=A_scale, B_scale=B_scale, bias=bias)
    wanted = dtype or torch.bfloat16
    result = tritongemm.scaled_mm(
        A, B, _complete_blocks(A_scale, m), _complete_blocks(B_scale, n), _row(bias, wanted), wanted,
        order_b=SHUFFLED if bpreshuffle else "plain", scale_layout=_SHUFFLED_SCALES,
    )  # fmt: skip
    if out is None:
        return result
    out[:m].copy_(result)
    return out


def _check_memory(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, **operands: Tensor | None) -> None:
    """Refuse `out` memory that does not fit the result, before it is computed."""
    check_tensors({name: tensor for name, tensor in operands.items() if tensor is not None} | {"out": out})
    check_memory(out, shape, dtype, *operands.values())


def _is_memory(given: object, m: int, then: object) -> bool:
    """Return whether a tensor in the place of a bias is memory for a result of M rows; refuse one that may be either.

    `then` is the argument behind it, which is a type in newer AITER alone.
    """
    if not isinstance(given, torch.Tensor) or given.dim() != 2 or isinstance(then, torch.dtype):
        return False
    if given.element_size() != 2 or given.shape[0] < m:
        return False
    if given.shape[0] == 1:
        raise InputError(
            f"the fifth argument is {given.dtype} {tuple(given.shape)}, which may be a bias or memory for the result; "
            "give a bias as [N], and memory as out=…"
        )
    return True


def is_shuffled(w: object) -> bool:
    """Return whether a weight is one that AITER's ``shuffle_weight`` made."""
    return getattr(w, "is_shuffled", False) is True


def require_plain(**weights: object) -> None:
    """Refuse weights in AITER's order where plain ones are read."""
    for name, w in weights.items():
        if is_shuffled(w):
            raise InputError(f"{name} is shuffled, and read as it was before; tritongemm.unpack_weight is the way back")


def require_tensors(**operands: object) -> None:
    """Refuse arguments that are no tensors."""
    check_tensors(operands, together=False)


def _require_matrices(**operands: Tensor) -> None:
    """Refuse operands without two dimensions."""
    require_tensors(**operands)
    for name, tensor in operands.items():
        if tensor.dim() != 2:
            raise InputError(f"{name} is {tuple(tensor.shape)}; it has two dimensions")


def _one_row(name: str, values: Tensor) -> Tensor:
    """Return values along one dimension as a vector; refuse those of two, as factors for groups along K have."""
    require_tensors(**{name: values})
    if sum(size != 1 for size in values.shape) > 1:
        raise InputError(f"{name} is {tuple(values.shape)}; here it has one dimension, a value for each of N")
    return values.reshape(-1)


def _complete_blocks(scales: Tensor, rows: int) -> Tensor:
    """Return shuffled factors without the blocks with which AITER pads them."""
    return scales[: round_up(rows, _SCALE_ROWS)]


def _result(dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.bfloat16


def _row(bias: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a bias [N] in the type of the result, as kernels read it."""
    if bias is None:
        return None
    return _one_row("bias", bias).to(_result(dtype))

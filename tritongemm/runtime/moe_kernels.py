"""The small kernels between the products of `fused_moe`, in Triton: sort, gather, activate and combine.

None of them asks the GPU for a number, so a call can be captured. Quantised rows come with their factors, as
`grouped_mm` takes them: one for each row, or [rows, K / 128] that lie with K first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DEPTH = 128  # elements of a row that share a factor of a block
_SORTED_AT_A_TIME = 1024  # ids that a program looks at together
_COMBINED_AT_A_TIME = 1024  # columns of a token's result
_MODES = {"": 0, "row": 1, "block": 2}
_Pair = tuple[Tensor, "Tensor | None"]


@triton.jit  # type: ignore[untyped-decorator]
def _sort(ids_ptr, order_ptr, place_ptr, ends_ptr, count, EXPERTS, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program for each expert, and a last one for ids of no expert; each looks at all ids, so nobody waits.
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    same = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        ids = tl.load(ids_ptr + start + lanes, mask=start + lanes < count, other=0).to(tl.int32)
        ids = tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids)
        ids = tl.where(start + lanes < count, ids, EXPERTS + 1)
        below += (ids < expert).to(tl.int32)
        same += (ids == expert).to(tl.int32)
    at = tl.sum(below, 0)
    if expert < EXPERTS:
        tl.store(ends_ptr + expert, at + tl.sum(same, 0))
    for start in range(0, count, BLOCK):
        ids = tl.load(ids_ptr + start + lanes, mask=start + lanes < count, other=0).to(tl.int32)
        ids = tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids)
        here = (ids == expert) & (start + lanes < count)
        place = at + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, start + lanes, mask=here)
        tl.store(place_ptr + start + lanes, place, mask=here)
        at += tl.sum(here.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    values, q_ptr, scale_ptr, row, rows, K, MODE: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    # One row, as it is, or in eight bits with a factor for all of it or for each DEPTH elements.
    lanes = tl.arange(0, BLOCK)
    out = q_ptr + row.to(tl.int64) * K + lanes
    if MODE == 0:
        tl.store(out, values.to(q_ptr.dtype.element_ty), mask=lanes < K)
    elif MODE == 1:
        factor = tl.max(tl.abs(values), 0) / MAXIMUM
        factor = tl.where(factor == 0, 1.0, factor)
        tl.store(scale_ptr + row, factor)
        tl.store(
            out,
            tl.clamp(values / factor, -MAXIMUM, MAXIMUM, tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty),
            mask=lanes < K,
        )
    else:
        parts = tl.reshape(values, (BLOCK // DEPTH, DEPTH))
        factors = tl.max(tl.abs(parts), 1) / MAXIMUM
        factors = tl.where(factors == 0, 1.0, factors)
        which = tl.arange(0, BLOCK // DEPTH)
        tl.store(scale_ptr + which.to(tl.int64) * rows + row, factors, mask=which < tl.cdiv(K, DEPTH))
        parts = tl.clamp(parts / factors[:, None], -MAXIMUM, MAXIMUM, tl.PropagateNan.ALL)
        tl.store(out, tl.reshape(parts, (BLOCK,)).to(q_ptr.dtype.element_ty), mask=lanes < K)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x_ptr, order_ptr, q_ptr, scale_ptr, rows, K, stride, TOPK: tl.constexpr, MODE: tl.constexpr, MAXIMUM: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    token = tl.load(order_ptr + row) // TOPK
    values = tl.load(x_ptr + token.to(tl.int64) * stride + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    _put(values, q_ptr, scale_ptr, row, rows, K, MODE, MAXIMUM, BLOCK, DEPTH)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    h_ptr, q_ptr, scale_ptr, rows, K, GELU: tl.constexpr, MODE: tl.constexpr, MAXIMUM: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    at = h_ptr + row.to(tl.int64) * 2 * K + lanes
    gate = tl.load(at, mask=lanes < K, other=0.0).to(tl.float32)
    up = tl.load(at + K, mask=lanes < K, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108 (a constant decides, when it is compiled)
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = gate / (1 + tl.exp(-gate))
    _put(gate * up, q_ptr, scale_ptr, row, rows, K, MODE, MAXIMUM, BLOCK, DEPTH)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    y_ptr, place_ptr, weight_ptr, ends_ptr, out_ptr, K, EXPERTS, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(ends_ptr + EXPERTS - 1)  # rows from here on are of no expert, and nobody has computed them
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOPK):
        place = tl.load(place_ptr + token * TOPK + j)
        weight = tl.load(weight_ptr + token * TOPK + j).to(tl.float32)
        mask = columns < tl.where(place < there, K, 0)
        total += weight * tl.load(y_ptr + place.to(tl.int64) * K + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * K + columns, total.to(out_ptr.dtype.element_ty), mask=columns < K)


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert: which one each place holds, where each went, and the place behind each expert's last."""
    count, near = ids.numel(), ids.device
    order, place = (torch.empty(count, dtype=torch.int32, device=near) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=near)
    block = min(_SORTED_AT_A_TIME, max(32, triton.next_power_of_2(count)))
    _sort[(experts + 1,)](ids, order, place, ends, count, experts, BLOCK=block)
    return order, place, ends


def gather(x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> _Pair:
    """Each sorted row's token of x [tokens, K], in a type, with its factors where it is quantised."""
    rows, k = order.numel(), x.shape[1]
    q, scale, shared = _result(rows, k, mode, dtype, x.device)
    _gather[(rows,)](x, order, q, q if scale is None else scale, rows, k, x.stride(0), TOPK=topk, **shared)
    return q, _as_taken(scale, mode)


def activate(h: Tensor, activation: str, mode: str, dtype: torch.dtype) -> _Pair:
    """The activation of the left half of h [rows, 2 K] times the right half, as `gather` gives rows."""
    rows, k = h.shape[0], h.shape[1] // 2
    q, scale, shared = _result(rows, k, mode, dtype, h.device)
    _activate[(rows,)](h, q, q if scale is None else scale, rows, k, GELU=activation == "gelu", **shared)
    return q, _as_taken(scale, mode)


def combine(y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of each token's rows of y, in their order; rows of no expert count nothing."""
    tokens, topk = weights.shape
    k = y.shape[1]
    out = torch.empty((tokens, k), dtype=dtype, device=y.device)
    block = min(_COMBINED_AT_A_TIME, triton.next_power_of_2(k))
    grid = tokens, triton.cdiv(k, block)
    _combine[grid](y, place, weights, ends, out, k, ends.numel(), TOPK=topk, BLOCK=block)
    return out


def _result(
    rows: int, k: int, mode: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Memory for rows and their factors, and what a kernel must know of them."""
    q = torch.empty((rows, k), dtype=dtype, device=device)
    shapes = {"": None, "row": (rows,), "block": (-(-k // DEPTH), rows)}
    shape = shapes[mode]
    scale = None if shape is None else torch.empty(shape, dtype=torch.float32, device=device)
    block = max(DEPTH, triton.next_power_of_2(k))
    maximum = torch.finfo(dtype).max if mode else 0.0
    warps = 4 if block <= 4096 else 8
    return q, scale, {"MODE": _MODES[mode], "MAXIMUM": maximum, "BLOCK": block, "DEPTH": DEPTH, "num_warps": warps}


def _as_taken(scale: Tensor | None, mode: str) -> Tensor | None:
    return scale.mT if scale is not None and mode == "block" else scale

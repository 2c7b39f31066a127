"""The steps around products that want room between the rows of experts, as `templates/helpers/experts.j2` has them.

They quantise as `fused_moe` does, and read and write rows at given places, so that only the products of
one form of a mixture and another differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritongemm.build.expert_kernels import DEPTH
from tritongemm.build.helpers import read_text
from tritongemm.codegen import modules

_put = modules.run_text(read_text("experts"), "experts").put_row

_MODES = {"": 0, "block": 2}


@triton.jit
def _put_at(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    values, q_ptr, scale_ptr, at, ROOM, K, MODE: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    # Each ROOM rows have factors of their own, with K first.
    first = at // ROOM * ROOM
    of_room = scale_ptr + first * tl.cdiv(K, DEPTH)
    _put(values, q_ptr + first * K, of_room, at - first, ROOM, K, 0, MODE, MAXIMUM, 0, 0, 1, BLOCK, DEPTH)


@triton.jit
def _gather_to(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x_ptr, order_ptr, at_ptr, q_ptr, scale_ptr, ROOM, K, stride, TOPK: tl.constexpr, MODE: tl.constexpr,
    MAXIMUM: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    token = tl.load(order_ptr + row) // TOPK
    values = tl.load(x_ptr + token.to(tl.int64) * stride + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    _put_at(values, q_ptr, scale_ptr, tl.load(at_ptr + row), ROOM, K, MODE, MAXIMUM, BLOCK, DEPTH)


@triton.jit
def _activate_at(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    h_ptr, at_ptr, q_ptr, scale_ptr, ROOM, K, MODE: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    at = tl.load(at_ptr + tl.program_id(0))
    lanes = tl.arange(0, BLOCK)
    gate = tl.load(h_ptr + at * 2 * K + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + at * 2 * K + K + lanes, mask=lanes < K, other=0.0).to(tl.float32)
    _put_at(gate / (1 + tl.exp(-gate)) * up, q_ptr, scale_ptr, at, ROOM, K, MODE, MAXIMUM, BLOCK, DEPTH)


def gather_to(x: Tensor, order: Tensor, topk: int, at: Tensor, mode: str, q: Tensor, scale: Tensor | None) -> None:
    """Write each sorted row's token of x [tokens, K].

    Args:
        x: activations.
        order: which row of tokens times `topk` each sorted row is.
        topk: rows of a token.
        at: int64, where each sorted row goes among the rows of q.
        mode: ``block``, or ``""`` for rows as they are.
        q: [..., room, K], written.
        scale: its factors [..., K / 128, room], written; None without.
    """
    given = (x, order, at, q, q if scale is None else scale, q.shape[-2], q.shape[-1], x.stride(0))
    _gather_to[(order.numel(),)](*given, TOPK=topk, **_constants(q, mode))


def activate_at(h: Tensor, at: Tensor, mode: str, q: Tensor, scale: Tensor | None) -> None:
    """Write SiLU of the left half of h's rows times the right half, to the same places of q, as `gather_to` writes."""
    given = (h, at, q, q if scale is None else scale, q.shape[-2], q.shape[-1])
    _activate_at[(at.numel(),)](*given, **_constants(q, mode))


def _constants(q: Tensor, mode: str) -> dict[str, object]:
    block = max(DEPTH, triton.next_power_of_2(q.shape[-1]))
    maximum = torch.finfo(q.dtype).max if mode else 0.0
    warps = 4 if block <= 4096 else 8
    return {"MODE": _MODES[mode], "MAXIMUM": maximum, "BLOCK": block, "DEPTH": DEPTH, "num_warps": warps}

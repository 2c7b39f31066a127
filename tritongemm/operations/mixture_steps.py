"""The steps between the products of `fused_moe` in plain PyTorch, where there is no GPU or no kernel.

They give what those of `tritongemm.serving.mixtures` give, and ask a GPU for no number either.
"""

from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import MX_MODES, powers_of
from tritongemm.core.scaling import SCALED_BLOCK as DEPTH
from tritongemm.operations import microscaling
from tritongemm.operations.linear_act import parts
from tritongemm.operations.quantisation import by_torch

Rows: TypeAlias = "tuple[Tensor, Tensor | None]"  # and their factors, where they are quantised


class ExpertBias(NamedTuple):
    """What is added to rows."""

    values: Tensor  # a row for each expert [experts, N]
    ids: Tensor  # the experts of tokens [tokens, k]
    order: Tensor  # which of these rows each place holds, as `MixtureSteps.sort` gives it

    def of(self, rows: Tensor) -> Tensor:
        """Return the bias of rows of all tokens' experts, by their numbers; of no expert any."""
        return self.values[self.ids.flatten()[rows].clamp(0, self.values.shape[0] - 1)].float()


class MixtureSteps(Protocol):
    """What is done between the products of a mixture of experts; no step waits for the GPU."""

    def sort(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by expert: which one each place holds, where each went, and the place behind each expert's last."""

    def gather(self, x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> Rows:
        """Return each sorted row's token of x [tokens, K], in a type, with its factors where it is quantised."""

    def route(
        self, x: Tensor, ids: Tensor, experts: int, mode: str, dtype: torch.dtype
    ) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
        """Gather the rows of ids [tokens, k] as `sort` sorts them, and return also what it does."""

    def activate(
        self, h: Tensor, activation: str, mode: str, dtype: torch.dtype, bias: ExpertBias | None = None, run: int = 0,
        into: "Rows | None" = None,
    ) -> Rows:  # fmt: skip
        """Return the activation of the left half of h [rows, 2 K] times the right half, as `gather` gives rows.

        Columns of both alternate by `run` where that is not 0, and there is no bias then. A kernel writes the rows and
        factors to memory as of `empty_rows`, if it is given.
        """

    def combine(
        self, y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype,
        bias: ExpertBias | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of each token's rows of y, in their order; rows of no expert count nothing."""


def empty_rows(near: Tensor, rows: int, k: int, mode: str, dtype: torch.dtype) -> Rows:
    """Return the memory for rows and their factors."""
    if mode in MX_MODES:
        return microscaling.empty_pair((rows, k), dtype, powers_of(mode).layout, near.device)
    shapes = {"row": (rows,), "block": (cdiv(k, DEPTH), rows)}
    scale = near.new_empty(shapes[mode], dtype=torch.float32) if mode else None
    return near.new_empty((rows, k), dtype=dtype), scale


def as_taken(scale: Tensor | None, mode: str) -> Tensor | None:
    """Return the factors that were written for kernels, as `grouped_mm` takes them."""
    return scale.mT if scale is not None and mode == "block" else scale


def parts_of(result: Tensor, rows: int, mode: str) -> Rows:
    """Return the rows of a product that was activated, with the factors behind them where they are quantised."""
    if not mode:
        return result, None
    q, factors = parts(result, rows)
    return q, as_taken(factors, mode)


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by expert: which one each place holds, where each went, and the place behind each expert's last."""
    found, order = torch.where((ids < 0) | (ids >= experts), experts, ids).flatten().sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=ids.device, dtype=found.dtype), right=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=ids.device))
    return order, place, ends.int()


def gather(x: Tensor, order: Tensor, topk: int, mode: str, dtype: torch.dtype) -> Rows:
    """Return each sorted row's token of x [tokens, K], in a type, with its factors where it is quantised."""
    return _put(x[order // topk], mode, dtype)


def route(
    x: Tensor, ids: Tensor, experts: int, mode: str, dtype: torch.dtype
) -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    """Gather the rows of ids [tokens, k] as `sort` sorts them, and return also what it does."""
    found = sort(ids, experts)
    return gather(x, found[0], ids.shape[1], mode, dtype), found


def activate(
    h: Tensor, activation: str, mode: str, dtype: torch.dtype, bias: ExpertBias | None = None, run: int = 0,
    into: "Rows | None" = None,
) -> Rows:  # fmt: skip
    """Return the activation of gate times up, columns of h [rows, 2 K], as `gather` gives rows."""
    h = h.float() if bias is None else h.float() + bias.of(bias.order)
    gate, up = (one.flatten(1) for one in h.unflatten(1, (-1, 2, run or h.shape[1] // 2)).unbind(2))
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        gate = gate * torch.sigmoid(1.702 * gate)
    else:
        gate = functional.gelu(gate) if activation == "gelu" else functional.silu(gate)
    return _put(gate * up, mode, dtype)


def combine(
    y: Tensor, place: Tensor, ends: Tensor, weights: Tensor, dtype: torch.dtype, bias: ExpertBias | None = None
) -> Tensor:
    """Return the weighted sum of each token's rows of y, in their order; rows of no expert count nothing."""
    rows = y.float()[place].view(*weights.shape, -1)
    if bias is not None:
        rows = rows + bias.of(torch.arange(weights.numel(), device=y.device)).view_as(rows)
    there = (place < ends[-1]).view(*weights.shape, 1)
    return torch.where(there, rows * weights.float()[..., None], 0.0).sum(1).to(dtype)


def _put(values: Tensor, mode: str, dtype: torch.dtype) -> Rows:
    if not mode:
        return values.to(dtype), None
    if mode in MX_MODES:
        return microscaling.by_torch(values, dtype, powers_of(mode).layout)
    if dtype == torch.int8:
        q, factors = by_torch(values, mode, dtype, "rows")
        return q, factors.flatten()
    rows, k = values.shape
    most = torch.finfo(dtype).max
    depth = k if mode == "row" else DEPTH
    parts = functional.pad(values.float(), (0, -k % depth)).view(rows, -1, depth)
    factors = parts.abs().amax(-1) / most
    factors = torch.where(factors == 0, 1.0, factors)
    q = (parts / factors[..., None]).clamp(-most, most).view(rows, -1)[:, :k].to(dtype)
    return q, factors.flatten() if mode == "row" else factors.T.contiguous().T

"""Which calls of a weight with factors along K a tuned kernel serves, and in which layout it reads activations'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.operations.quantisation import empty_factors
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.serving.calls import CallTable, keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.products import multiply_quantized, scaled_mm
from tritongemm.serving.quantize import quantize

LAYOUTS = ("groups", "rows", "tma")  # of factors along K; PyTorch's own products want the first
AS_IT_IS = "as it is"  # activations that are quantised already
_NOT_TUNED = ("fallback", "library")
_NEAR = "near"
_UNKNOWN: Final = object()


class BlockOperands(NamedTuple):
    """The operands of a layer in blocks: activations [..., K], quantised or not, the weight [N, K] and its factors."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    x_scale: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16


class _FoundLayouts(threading.local):
    """What one thread has found: a layout, or None where no row holds, by shapes, strides and dtypes."""

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], str | None] = {}
        self.valid_with: CallTable | None = None  # The dispatcher replaces its table when records are added.


_found: Final = _FoundLayouts()


def find_layout(operands: BlockOperands, near: bool) -> str | None:
    """The layout of activations' factors that the tuned kernel of a call reads; None where no row holds for it.

    Activations that are quantised already are served where their factors lie so: `AS_IT_IS`.

    Args:
        operands: the call's.
        near: whether a row of another M holds too, where `serves_other_m` says so and none has this M.
    """
    x, weight, weight_scale, x_scale, bias, out_dtype = operands
    dispatcher = default_dispatcher()
    if weight.shape not in dispatcher.scaled_weights or not x.is_cuda:
        return None
    if _found.valid_with is not dispatcher.calls:
        _found.table, _found.valid_with = {}, dispatcher.calls
    scales = None if x_scale is None else (x_scale.shape, x_scale.stride())
    key = (x.shape, x.dtype, weight.shape, weight.dtype, x.get_device(), weight_scale.shape, weight_scale.stride(),
           scales, bias is None, out_dtype, near)  # fmt: skip
    known = _found.table.get(key, _UNKNOWN)
    if known is not _UNKNOWN:
        return known  # type: ignore[return-value]
    chosen: str | None = None
    nearest, lasting = chosen, True
    for layout, given in _forms(operands):
        try:
            resolution = dispatcher.ask(SCALED, SCALED.check(given)).resolution
        except InputError:  # A server's operands may be of another kind altogether.
            continue
        lasting = lasting and resolution.lasting
        if resolution.kind == _NEAR:
            nearest = nearest or layout
        elif resolution.kind not in _NOT_TUNED:
            chosen = layout
            break
    if near:
        chosen = chosen or nearest
    if lasting:
        keep(_found.table, key, chosen)
    return chosen


def _forms(operands: BlockOperands) -> Iterator[tuple[str, ScaledOperands]]:
    """What could be multiplied, by the layout of the activations' factors."""
    x, weight, weight_scale, x_scale, bias, out_dtype = operands
    if x_scale is not None:
        yield AS_IT_IS, ScaledOperands(x, weight, x_scale, weight_scale, bias, out_dtype)
        return
    q = torch.empty_like(x, dtype=weight.dtype)
    for layout in LAYOUTS:
        factors = empty_factors(x, "block", layout)
        yield layout, ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype)


def compute(operands: BlockOperands, layout: str) -> Tensor:
    """The product, with activations quantised to a layout that `find_layout` gave."""
    x, weight, weight_scale, x_scale, bias, out_dtype = operands
    if x_scale is None:
        q, factors = quantize(x, "block", weight.dtype, layout)
        return multiply_quantized(ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype))
    return scaled_mm(x, weight, x_scale, weight_scale, bias, out_dtype)


def compute_or(operands: BlockOperands, otherwise: Callable[[], Tensor]) -> Tensor:
    """The product by a tuned kernel, or what `otherwise`, a server's own kernel, gives where no row has its M."""
    layout = find_layout(operands, near=False)
    return otherwise() if layout is None else compute(operands, layout)

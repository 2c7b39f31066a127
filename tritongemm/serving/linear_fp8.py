"""The public call `linear_fp8`: a linear layer of a quantised weight, whose activations are quantised on the way."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.serving import scaled_dispatch
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.dispatcher import CallTable
from tritongemm.serving.quantize import empty_factors, quantize
from tritongemm.serving.scale_factors import describe_known, find_scalings
from tritongemm.serving.scaled_api import scaled_mm
from tritongemm.serving.scaled_operands import ScaledOperands, read_product

_NOT_TUNED = ("fallback", "library")
_LAYOUTS = ("groups", "rows", "tma")  # of factors along K; PyTorch's own products want the first
_MOST_CALLS = 8192  # Calls kept for one thread; sequences of any length must not fill the memory.


class _FoundLayouts(threading.local):
    """The layout that the kernel of a call reads, in one thread, by shapes and dtypes."""

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], str] = {}
        self.valid_with: CallTable | None = None  # The dispatcher replaces its table when records are added.


_found: Final = _FoundLayouts()


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """X @ (weight * weight_scale).T (+ bias): x is quantised by one kernel, then multiplied by `scaled_mm`.

    Where the weight's factors change along K, activations have a factor for each 128 elements along K, in the layout
    that the tuned kernel of this size reads; else they have one for each row. Under torch.compile both kernels are one
    operation. There is no gradient.

    Args:
        x: [..., K] of bfloat16, float16 or float32.
        weight: [N, K] of fp8 or int8.
        weight_scale: float32: one, [N], [N / 128, K / 128] or [N, K / 128].
        bias: [N] or None.
        out_dtype: x's by default.

    Returns:
        [..., N], dense, in order of the current stream.

    Raises:
        InputError: operands that do not belong together.
    """
    wanted = x.dtype if out_dtype is None else out_dtype
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = torch.ops.tritongemm.linear_fp8(x, weight, weight_scale, bias, wanted)
        return result
    return _linear(x, weight, weight_scale, bias, wanted)


def _linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if _changes_along_k(weight, weight_scale):
        layout = _choose_layout(x, weight, weight_scale, bias, out_dtype)
        q, scale = quantize(x, "block", weight.dtype, layout)
    else:
        q, scale = quantize(x, "row", weight.dtype)
        if weight_scale.numel() == 1:  # Kernels read a factor for each row.
            weight_scale = weight_scale.reshape(1).expand(weight.shape[0]).contiguous()
    return scaled_mm(q, weight, scale, weight_scale, bias, out_dtype)


def _changes_along_k(weight: Tensor, weight_scale: Tensor) -> bool:
    """Whether a weight's factors change along K.

    Raises:
        InputError: they are not those of the weight.
    """
    if weight.dim() != 2:
        raise InputError(f"weight is {tuple(weight.shape)}; a linear layer's is [N, K]")
    n, k = weight.shape
    found = find_scalings(weight_scale, n, k, "")
    if not found:
        raise InputError(
            f"weight_scale is {weight_scale.dtype} {tuple(weight_scale.shape)} with strides {weight_scale.stride()}; "
            f"it may be {describe_known(n, k, 'N')}"
        )
    return found[0].depth > 0


def _choose_layout(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> str:
    """The layout of the activations' factors that the tuned kernel of a call reads; PyTorch's where none is tuned."""
    dispatcher, found = default_dispatcher(), _found
    if not x.is_cuda or weight.shape not in dispatcher.scaled_weights:
        return _LAYOUTS[0]
    if found.valid_with is not dispatcher.calls:
        found.table, found.valid_with = {}, dispatcher.calls
    key = (x.shape, weight.shape, weight.dtype, x.get_device(), weight_scale.shape, bias is None, out_dtype)
    known = found.table.get(key)
    if known is not None:
        return known
    q, kinds = torch.empty_like(x, dtype=weight.dtype), dict[str, str]()
    for layout in _LAYOUTS:
        factors = empty_factors(x, "block", layout)
        operands = ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype)
        resolution = scaled_dispatch.ask(dispatcher, read_product(operands), operands).resolution
        if not resolution.lasting:
            return _LAYOUTS[0]
        kinds[layout] = resolution.kind
    chosen = next((layout for layout, kind in kinds.items() if kind not in _NOT_TUNED), _LAYOUTS[0])
    if len(found.table) >= _MOST_CALLS:
        found.table.clear()
    found.table[key] = chosen
    return chosen


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


# Kept here, as the operation lives as long as this object. Kernels want the strides that they were traced with.
_OPERATIONS = torch.library.Library("tritongemm", "FRAGMENT")
_OPERATIONS.define(
    "linear_fp8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)),
)
for _key in ("CUDA", "CPU"):
    _OPERATIONS.impl("linear_fp8", _linear, _key)
torch.library.register_fake("tritongemm::linear_fp8", _fake, lib=_OPERATIONS)

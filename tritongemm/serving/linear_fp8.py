"""The public call `linear_fp8`: a linear layer of a quantised weight, whose activations are quantised on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.serving.quantize import quantize
from tritongemm.serving.scale_factors import describe_known, find_scalings
from tritongemm.serving.scaled_api import scaled_mm
from tritongemm.serving.traced_operations import define_operation
from tritongemm.serving.tuned_blocks import LAYOUTS, BlockOperands, compute, find_layout


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
        operands = BlockOperands(x, weight, weight_scale, None, bias, out_dtype)
        return compute(operands, find_layout(operands, near=True) or LAYOUTS[0])
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


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


define_operation(
    "linear_fp8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
    _linear,
    _fake,
)

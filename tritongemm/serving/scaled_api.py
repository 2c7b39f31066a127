"""The public function `scaled_mm`, and the custom operator that torch.compile and torch.export trace for it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tritongemm.core.problem import PLAIN
from tritongemm.operations.scaled import ScaledOperands, is_transposed, read_product
from tritongemm.operations.torch_scaled import TorchScaled
from tritongemm.serving.api import default_dispatcher
from tritongemm.serving.scaled_dispatch import CheckedProduct, resolve
from tritongemm.serving.traced_operations import define_operation

_BFLOAT16: Final = torch.bfloat16
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_compiling
_grad = torch.is_grad_enabled
_forward = torch.autograd.forward_ad


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    order_b: str = PLAIN,
    scale_layout: str = "",
) -> Tensor:
    """Compute (a * scale_a) @ (b * scale_b).T (+ bias) with the tuned kernel for this size, else with PyTorch.

    For inference. Factors are float32, or powers of two (e8m0) per 32 elements along K. Their shapes give the
    granularity: one factor; one per row, [M] or [M, 1] and [N], [N, 1] or [1, N]; [M, K / 128] per 128 elements along K
    of a row, row-major or M-major by their strides; [N / 128, K / 128] or [N, K / 128] for the weight. The call does
    not synchronise with the GPU, so NaN and infinite factors are detected on the CPU only.

    Args:
        a: [..., K] of fp8, int8 or fp4 (two numbers per byte); tuned kernels need contiguous rows on a GPU.
        b: [N, K], a linear layer's weight, or its transposed view [K, N] as ``torch._scaled_mm`` takes it; scale_b is
            transposed with it.
        scale_a: scale factors of a.
        scale_b: scale factors of b.
        bias: [N] or None.
        out_dtype: bfloat16, float16 or float32.
        order_b: memory layout of b: ``plain``, or a plug-in of numerics/weight_layouts, e.g. ``shuffled_16x16``.
        scale_layout: "" if the factors' strides give their layout, or a plug-in of numerics/scale_layouts.

    Returns:
        [..., N], contiguous, ordered on the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: shapes, strides, dtypes or devices that do not fit together, or an fp8 encoding that this GPU does
            not compute.
        DriverError: the driver refused a launch.
    """
    if _compiling():
        result: Tensor = _trace(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)
        return result
    if (
        type(a) not in _PLAIN_TENSORS
        or type(b) not in _PLAIN_TENSORS
        or type(scale_a) not in _PLAIN_TENSORS
        or type(scale_b) not in _PLAIN_TENSORS
        or (bias is not None and type(bias) not in _PLAIN_TENSORS)
        or _modes()
        or _tracing() is not None
        or _forward._current_level >= 0
        or (_grad() and (scale_a.requires_grad or scale_b.requires_grad or (bias is not None and bias.requires_grad)))
    ):
        return _unusual(ScaledOperands(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout))
    return _run(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)


def _run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    order_b: str,
    scale_layout: str,
) -> Tensor:
    """The result for plain tensors. A call's cost is that of this key and of `ScaledCall`."""
    try:
        key: tuple[Any, ...] = (
            a.shape, b.shape, b.stride(), a.dtype, b.dtype, a.get_device(), scale_a.shape, scale_a.stride(),
            scale_a.dtype, scale_b.shape, scale_b.stride(), scale_b.dtype, out_dtype, order_b, scale_layout,
        )  # fmt: skip
        if bias is not None:
            key = (*key, bias.shape, bias.dtype)
    except RuntimeError:  # sparse tensors have no strides, nested ones no shape; to ask each would cost every call
        read_product(ScaledOperands(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout))
        raise
    dispatcher = default_dispatcher()
    call = dispatcher.calls.table.get(key)
    if call is None:
        operands = ScaledOperands(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)
        call = resolve(dispatcher, key, operands)
    result: Tensor = call(a, b, scale_a, scale_b, bias, out_dtype)
    return result


def multiply_quantized(operands: ScaledOperands) -> Tensor:
    """Compute `scaled_mm` for activations that this package quantised, whose factors the caller did not pass.

    NaN and infinity in the activations propagate into the result, as in PyTorch's layers: on a GPU values are not
    checked.
    """
    if operands.a.is_cuda:
        return scaled_mm(*operands[:6])
    return TorchScaled(read_product(operands))(*operands[:6])


def _unusual(operands: ScaledOperands) -> Tensor:
    """A call in a mode: subclasses, tracers, transforms, and factors or a bias that want a gradient."""
    a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout = operands
    product = read_product(operands)
    wants_gradient = any(tensor.requires_grad for tensor in (scale_a, scale_b, bias) if tensor is not None)
    if _modes() and not (_grad() and wants_gradient):
        result: Tensor = _trace(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)
        return result
    return CheckedProduct(TorchScaled(product))(a, b, scale_a, scale_b, bias, out_dtype)


def _operation(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = _BFLOAT16,
    order_b: str = PLAIN,
    scale_layout: str = "",
) -> Tensor:
    return _run(a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout)


def _differentiable(*given: Any) -> Tensor:
    operands = ScaledOperands(*given)
    return TorchScaled(read_product(operands))(*operands[:6])


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = _BFLOAT16,
    order_b: str = PLAIN,
    scale_layout: str = "",
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1 if is_transposed(a, b) else 0]), dtype=out_dtype)


_trace = define_operation(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType out_dtype=bfloat16, "
    'str order_b="plain", str scale_layout="") -> Tensor',
    _operation,
    _fake,
    _differentiable,
)

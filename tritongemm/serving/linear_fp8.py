"""The public call `linear_fp8`: a linear layer of a quantised weight, whose activations are quantised on the way where
that pays.
"""

from typing import Any

import torch
from torch import Tensor

from tritongemm.operations.checks import check_tensors, check_values
from tritongemm.operations.quantisation import empty_pair
from tritongemm.operations.quantised_layer import QUANTISED_LAYER, CheckedLayer, LayerOperands, factors_of_rows
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.serving.api import mm
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.layer_choice import LAYOUTS, BlockOperands, LayerChoice, choose, compute, find_layout
from tritongemm.serving.products import multiply_quantized
from tritongemm.serving.quantize import quantize
from tritongemm.serving.traced_operations import define


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    unquantized: Tensor | None = None,
) -> Tensor:
    """Compute x @ (weight * weight_scale).T (+ bias): one kernel quantises x, then `scaled_mm` multiplies it.

    Where the weight's factors change along K, activations have a factor for each 128 elements along K, in the layout
    that the tuned kernel of this size reads, or a power of two for each 32 where the weight has that (OCP MX); else
    they have one for each row. Under torch.compile both kernels are one operation. There is no gradient for x. NaN and
    infinity in x are no error: they make their row of the result NaN.

    Given `unquantized` too, the loaded rows decide at each M: where quantisation and quantised product together take no
    less time than the product in x's type does by its own row, that one is computed. `tritongemm.explain` says which.

    Args:
        x: [..., K] of bfloat16, float16 or float32.
        weight: [N, K] of fp8 or int8; of fp4 bytes [N, K / 2].
        weight_scale: float32: one, [N], [N / 128, K / 128] or [N, K / 128]; or e8m0 [N, K / 32].
        bias: [N] or None.
        out_dtype: x's by default.
        unquantized: the weight [N, K] in x's type, its factors multiplied in, or None.

    Returns:
        [..., N], dense, in order of the current stream.

    Raises:
        TypeError: an operand is no tensor.
        InputError: operands that do not belong together.

    Examples:
        >>> weight, scale = tritongemm.quantize(torch.randn(32, 256))
        >>> tritongemm.linear_fp8(torch.randn(4, 256), weight, scale.flatten()).shape
        torch.Size([4, 32])
    """
    check_tensors({"x": x, "weight": weight, "weight_scale": weight_scale})
    wanted = x.dtype if out_dtype is None else out_dtype
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(x, weight, weight_scale, bias, wanted, unquantized)
        return result
    return _linear(x, weight, weight_scale, bias, wanted, unquantized)


def explain_layer(checked: CheckedLayer) -> str:
    """Return whether `linear_fp8` quantises these activations, and why; then which kernel multiplies.

    Returns:
        A line ``quantised: times`` or ``unquantised: times``, or the reason in place of the times, and the lines of
        `tritongemm.explain` for the product.
    """
    dispatcher, (x, *_, bias, _, unquantized) = default_dispatcher(), checked.given
    choice = _choose(checked)
    if choice.unquantized and unquantized is not None:
        answers = dispatcher.explain(x, unquantized, bias, checked.given.result_type)
        return f"unquantised: {choice.text}\n{answers}"
    lacking = ", but no unquantised weight is given" if choice.unquantized else ""
    answers = dispatcher.ask(SCALED, SCALED.check(_scaled_operands(checked)))
    return f"quantised: {choice.text}{lacking}\n{answers}"


def _linear(*given: Any, **named: Any) -> Tensor:
    checked = QUANTISED_LAYER.check(LayerOperands(*given, **named))
    (x, weight, weight_scale, bias, out_dtype, unquantized), granularity = checked
    assert out_dtype is not None
    if unquantized is not None and _choose(checked).unquantized:
        return mm(x, unquantized, bias, out_dtype)
    check_values(weight_scale=weight_scale)
    if granularity == "block":
        operands = _block_operands(checked)
        return compute(operands, find_layout(operands, near=True) or LAYOUTS[0])
    q, scale = quantize(x, granularity, weight.dtype)
    factors = factors_of_rows(weight, weight_scale) if granularity == "row" else weight_scale
    return multiply_quantized(ScaledOperands(q, weight, scale, factors, bias, out_dtype))


def _choose(checked: CheckedLayer) -> LayerChoice:
    if default_dispatcher().wants_invariant_rows:
        return LayerChoice(False, "rows must be invariant, so activations are quantised at every M")
    return choose(_block_operands(checked), lambda _: _scaled_operands(checked))


def _block_operands(checked: CheckedLayer) -> BlockOperands:
    x, weight, weight_scale, bias, *_ = checked.given
    return BlockOperands(x, weight, weight_scale, None, bias, checked.given.result_type)


def _scaled_operands(checked: CheckedLayer) -> ScaledOperands:
    """Return what `scaled_mm` would be given; the memory of activations and of their factors holds nothing."""
    (x, weight, weight_scale, bias, *_), granularity = checked
    layout, factors = "rows", weight_scale
    if granularity == "block":
        layout = find_layout(_block_operands(checked), near=True) or LAYOUTS[0]
    elif granularity == "row":
        factors = factors_of_rows(weight, weight_scale)
    q, scale = empty_pair(x, granularity, weight.dtype, layout)
    return ScaledOperands(q, weight, scale, factors, bias, checked.given.result_type)


_trace = define(QUANTISED_LAYER, _linear)

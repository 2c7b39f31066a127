"""The public call `linear_fp8`: a linear layer of a quantised weight, whose activations are quantised on the way where
that pays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.operations import microscaling
from tritongemm.operations.checks import check_fit, check_tensors, check_values
from tritongemm.operations.factors import EXPONENTS, describe_known, find_scalings, quantised_by
from tritongemm.operations.scaled import ScaledOperands
from tritongemm.serving.api import explain, mm
from tritongemm.serving.layer_choice import judge
from tritongemm.serving.quantize import empty_factors, quantize
from tritongemm.serving.scaled_api import multiply_quantized
from tritongemm.serving.traced_operations import define_operation
from tritongemm.serving.tuned_blocks import LAYOUTS, BlockOperands, compute, find_layout


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    unquantized: Tensor | None = None,
) -> Tensor:
    """X @ (weight * weight_scale).T (+ bias): x is quantised by one kernel, then multiplied by `scaled_mm`.

    Where the weight's factors change along K, activations have a factor for each 128 elements along K, in the layout
    that the tuned kernel of this size reads, or a power of two for each 32 where the weight has that (OCP MX); else
    they have one for each row. Under torch.compile both kernels are one operation. There is no gradient for x. NaN and
    infinity in x are no error: they make their row of the result NaN.

    Given `unquantized` too, the loaded rows decide at each M: where quantisation and quantised product together take no
    less time than the product in x's type does by its own row, that one is computed. `explain_linear_fp8` tells.

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
    """
    check_tensors({"x": x, "weight": weight, "weight_scale": weight_scale})
    wanted = x.dtype if out_dtype is None else out_dtype
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        result: Tensor = _trace(x, weight, weight_scale, bias, wanted, unquantized)
        return result
    return _linear(x, weight, weight_scale, bias, wanted, unquantized)


def explain_linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    unquantized: Tensor | None = None,
) -> str:
    """Whether `linear_fp8` quantises these activations, and why; then which kernel multiplies, as of `explain`.

    Returns:
        A line ``quantised: times`` or ``unquantised: times``, or the reason in place of the times, and the lines of
        `tritongemm.explain` for the product.

    Raises:
        TypeError, InputError: as `linear_fp8`.
    """
    check_tensors({"x": x, "weight": weight, "weight_scale": weight_scale})
    operands = BlockOperands(x, weight, weight_scale, None, bias, x.dtype if out_dtype is None else out_dtype)
    _check_unquantized(x, weight, unquantized)
    verdict = judge(operands, _scaled_operands)
    if verdict.unquantized and unquantized is not None:
        return f"unquantised: {verdict.text}\n{explain(x, unquantized, bias, operands.out_dtype)}"
    lacking = ", but no unquantised weight is given" if verdict.unquantized else ""
    a, b, of_a, of_b, *rest = _scaled_operands(operands)[:6]
    return f"quantised: {verdict.text}{lacking}\n{explain(a, b, *rest, scale_a=of_a, scale_b=of_b)}"


def _linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    unquantized: Tensor | None = None,
) -> Tensor:
    if not x.dim() or not x.shape[-1]:
        raise InputError(f"x is {tuple(x.shape)}; activations are [..., K], and there is nothing to multiply without K")
    operands = BlockOperands(x, weight, weight_scale, None, bias, out_dtype)
    if unquantized is not None:
        _check_unquantized(x, weight, unquantized)
        if judge(operands, _scaled_operands).unquantized:
            return mm(x, unquantized, bias, out_dtype)
    check_values(weight_scale=weight_scale)
    if weight_scale.dtype in EXPONENTS:
        q, powers = quantize(x, "mx", weight.dtype)
        return multiply_quantized(ScaledOperands(q, weight, powers, weight_scale, bias, out_dtype))
    if _changes_along_k(weight, weight_scale):
        return compute(operands, find_layout(operands, near=True) or LAYOUTS[0])
    q, scale = quantize(x, "row", weight.dtype)
    factors = _factors_of_rows(weight, weight_scale)
    return multiply_quantized(ScaledOperands(q, weight, scale, factors, bias, out_dtype))


def _factors_of_rows(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """A factor for each row of the weight, as kernels read them, also where all share one."""
    if weight_scale.numel() != 1:
        return weight_scale
    return weight_scale.reshape(1).expand(weight.shape[0]).contiguous()


def _scaled_operands(operands: BlockOperands) -> ScaledOperands:
    """What `scaled_mm` would be given; the memory of activations and of their factors holds nothing."""
    x, weight, weight_scale, _, bias, out_dtype = operands
    if weight_scale.dtype in EXPONENTS:
        pair = microscaling.empty_pair(x.shape, weight.dtype, "rows", x.device)
        return ScaledOperands(pair[0], weight, pair[1], weight_scale, bias, out_dtype)
    q = torch.empty_like(x, dtype=weight.dtype)
    if _changes_along_k(weight, weight_scale):
        factors = empty_factors(x, "block", find_layout(operands, near=True) or LAYOUTS[0])
    else:
        factors, weight_scale = empty_factors(x, "row", "rows"), _factors_of_rows(weight, weight_scale)
    return ScaledOperands(q, weight, factors, weight_scale, bias, out_dtype)


def _check_unquantized(x: Tensor, weight: Tensor, unquantized: Tensor | None) -> None:
    """Refuse an unquantised weight that is not of this layer.

    Raises:
        TypeError: it is no tensor.
        InputError: says what it is and what it may be.
    """
    if unquantized is None:
        return
    check_tensors({"x": x, "unquantized": unquantized}, together=False)
    found = unquantized.shape, unquantized.dtype, unquantized.device
    shape = torch.Size((*weight.shape[:1], x.shape[-1]))  # a byte of fp4 holds two numbers
    if found != (shape, x.dtype, weight.device):
        raise InputError(
            f"unquantized is {found[1]} {tuple(found[0])} on {found[2]}; of this layer it is {x.dtype} {tuple(shape)} "
            f"on {weight.device}"
        )


def _changes_along_k(weight: Tensor, weight_scale: Tensor) -> bool:
    """Whether a weight's factors change along K.

    Raises:
        InputError: they are not those of the weight.
    """
    if weight.dim() != 2:
        raise InputError(f"weight is {tuple(weight.shape)}; a linear layer's is [N, K]")
    n, k = weight.shape
    found = find_scalings(weight_scale, n, k)
    if not found:
        raise InputError(
            f"weight_scale is {weight_scale.dtype} {tuple(weight_scale.shape)} with strides {weight_scale.stride()}; "
            f"it may be {describe_known(n, k, 'N')}"
        )
    return quantised_by(weight_scale, found) == "block"


def _fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    unquantized: Tensor | None = None,
) -> Tensor:
    fit = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] * microscaling.packed(weight)
    check_fit(fit, "[..., K] and [N, K]", x=x, weight=weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


_trace = define_operation(
    "linear_fp8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
    "Tensor? unquantized=None) -> Tensor",
    _linear,
    _fake,
    _linear,
)

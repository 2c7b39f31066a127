"""The public function `explain`, which says what computes any call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.support import SUPPORTED, Support
from tritongemm.operations.checks import PLAIN_TYPES, require_tensors, wants_gradient
from tritongemm.operations.contract import bind
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.mixture import MIXTURE
from tritongemm.operations.quantised_layer import QUANTISED_LAYER
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.linear_fp8 import explain_layer
from tritongemm.serving.mixtures import list_products


def explain(call: str | Callable[..., Any] | Tensor | None = None, *operands: Any, **named: Any) -> str:
    """Say which kernel computes a call, and why.

    ``explain(x, w)`` explains `mm`; every other call is named first, such as ``explain(tritongemm.grouped_mm, a, b,
    offs)`` or ``explain("grouped_mm", a, b, offs)``.

    Args:
        call: the function or its name; left out for `mm`.
        operands: its arguments, of which only shapes, strides, types and devices count.
        named: those that it is given by name.

    Returns:
        For each product of the call a line that begins with ``exact``, ``range``, ``bucket``, ``near``, ``invariant``,
            ``library`` or ``fallback`` and, if kernel sources were asked, a line for each of them. For `linear_fp8` a
            line ``quantised`` or ``unquantised`` with the times comes first.

    Raises:
        TypeError: they are not its arguments, or one is no tensor.
        InputError: there is no such call, or it refuses such operands.

    Examples:
        >>> print(tritongemm.explain(torch.randn(4, 256), torch.randn(32, 256)))
        fallback: x is on cpu; tuned kernels run on a GPU
    """
    if isinstance(call, str):
        name = call
    elif callable(call):
        name = call.__name__
    else:
        name, operands = DENSE.name, operands if call is None and not operands else (call, *operands)
    operation, given = bind(name, operands, named)
    if operation is DENSE:
        support = _takes_fast_path(given)
        return str(default_dispatcher().explain(*given)) if support else f"fallback: {support}"
    checked = operation.check(given)
    if operation is QUANTISED_LAYER:
        return explain_layer(checked)
    if wants_gradient(*(one for one in given if isinstance(one, Tensor))):
        return "fallback: a gradient is wanted; call it under torch.no_grad()"
    products = list_products(checked) if operation is MIXTURE else operation.products(given)
    return "\n".join(str(default_dispatcher().ask(*product)) for product in products)


def _takes_fast_path(given: DenseOperands) -> Support:
    """Return whether shapes and dtypes alone decide which kernel computes a call, or what sends it to PyTorch.

    Raises:
        TypeError: an operand is no tensor.
    """
    x, w, bias, _ = given
    operands = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    require_tensors(operands)
    if not x.is_cuda:
        return SUPPORTED
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands.values()):
        return Support("a gradient is wanted; call it under torch.no_grad()")
    for name, t in operands.items():
        if type(t) not in PLAIN_TYPES:
            return Support(f"{name} is a {type(t).__name__}")
        if t.is_nested:
            return Support(f"{name} is nested")
        if t.device != x.device:
            return Support(f"{name} is on {t.device}, x on {x.device}")
        if t.layout == torch.strided and not (t.is_contiguous() or (t.dim() == 2 and t.t().is_contiguous())):
            return Support(f"{name} has strides {t.stride()}; kernels take dense rows or columns")
        if t.layout == torch.strided and t.is_cuda and t.data_ptr() % 16:
            return Support(f"{name} starts at {t.data_ptr():#x}, not a multiple of 16 bytes")
    return SUPPORTED

"""What PyTorch computes for a call of `tritongemm.bmm`, wherever no tuned kernel fits.

PyTorch's functions are bound when this is imported, since a capture puts others in their place, which count calls.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tritongemm.serving.batched_operands import BatchOperands
from tritongemm.serving.operand_checks import check_values
from tritongemm.serving.scaled_fallback import TorchScaled
from tritongemm.serving.scaled_operands import ScaledOperands, read_product
from tritongemm.serving.torch_fallback import converted, is_plain, output_dtype, wide_dtype

_bmm, _baddbmm = torch.bmm, torch.baddbmm
_ARGUMENTS = 6  # of a product with scales, before those that say how its operands lie
_torch_scaled = lru_cache(maxsize=256)(TorchScaled)  # which knows what PyTorch refused before


def torch_bmm(operands: BatchOperands) -> Tensor:
    """A @ B for each product, scaled, with the bias: in the result's dtype where PyTorch can, else in a wider one.

    Args:
        operands: with vectors as `check_shapes` leaves them, of any strides.
    """
    a, b, bias, out_dtype, _, _, _, out = operands
    added = None if bias is None else bias.unsqueeze(-2)
    if operands.scale_a is not None:
        product = _scaled(operands)
        return product if out is None else out.copy_(product)
    if is_plain(a, b, out_dtype) and (bias is None or bias.dtype == a.dtype):
        given = {} if out is None else {"out": out}
        result: Tensor = _bmm(a, b, **given) if added is None else _baddbmm(added, a, b, **given)
        return result
    wanted = output_dtype(a, out_dtype)
    wide = wide_dtype(a, b, wanted)
    product = _bmm(a.to(wide), b.to(wide))
    product = converted(product if added is None else product + added, wanted)
    return product if out is None else out.copy_(product)


def _scaled(operands: BatchOperands) -> Tensor:
    """The products of a batch with scale factors, one after another: PyTorch has no call of all of them."""
    a, b, bias, out_dtype, scale_a, scale_b, layout, _ = operands
    assert scale_a is not None and scale_b is not None
    check_values(scale_a=scale_a, scale_b=scale_b)
    (batch, m, _), n = a.shape, b.shape[2]
    wanted = output_dtype(a, out_dtype)
    if not a.numel() or not b.numel():  # sums of nothing, to which a bias is added all the same
        nothing = torch.zeros((batch, m, n), device=a.device)
        return (nothing if bias is None else nothing + bias.unsqueeze(-2)).to(wanted)
    of_b = scale_b.mT if scale_b.dim() > 2 else scale_b
    products = []
    for i in range(batch):
        weight = b[i].t()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        added = bias if bias is None or bias.dim() == 1 else bias[i]
        factors = _of_product(scale_a, i), _of_product(of_b, i)
        one = ScaledOperands(a[i], weight, *factors, added, wanted, scale_layout=layout)
        products.append(_torch_scaled(read_product(one))(*one[:_ARGUMENTS]))
    with torch._C._DisableAutocast():  # which has `stack` refuse 16 bits other than its own
        return torch.stack(products)


def _of_product(scales: Tensor, product: int) -> Tensor:
    return scales[product] if scales.dim() > 1 else scales

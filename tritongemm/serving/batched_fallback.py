"""What PyTorch computes for a call of `tritongemm.bmm`, wherever no tuned kernel fits.

PyTorch's functions are bound when this is imported, since a capture puts others in their place, which count calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.serving.batched_operands import BatchOperands
from tritongemm.serving.operand_checks import check_values
from tritongemm.serving.torch_fallback import is_plain, output_dtype

_bmm, _baddbmm = torch.bmm, torch.baddbmm


def torch_bmm(operands: BatchOperands) -> Tensor:
    """A @ B for each product, scaled, with the bias: in the result's dtype where PyTorch can, else in a wider one.

    Args:
        operands: with vectors as `check_shapes` leaves them, of any strides.
    """
    a, b, bias, out_dtype, scale_a, scale_b, out = operands
    added = None if bias is None else bias.unsqueeze(-2)
    if scale_a is None and is_plain(a, b, out_dtype) and (bias is None or bias.dtype == a.dtype):
        given = {} if out is None else {"out": out}
        result: Tensor = _bmm(a, b, **given) if added is None else _baddbmm(added, a, b, **given)
        return result
    wanted = output_dtype(a, out_dtype)
    # Integers go through float64, which holds every sum of int8 products exactly.
    wide = torch.float64 if not a.dtype.is_floating_point else torch.promote_types(torch.float32, wanted)
    product = _bmm(a.to(wide), b.to(wide))
    if scale_a is not None and scale_b is not None:
        check_values(scale_a=scale_a, scale_b=scale_b)
        product = product * scale_a.unsqueeze(-1) * scale_b.unsqueeze(-2)
    product = (product if added is None else product + added).to(wanted)
    return product if out is None else out.copy_(product)

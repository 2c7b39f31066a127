"""What PyTorch computes for a call of `grouped_mm`, wherever no tuned kernel fits."""

from __future__ import annotations

import torch
from torch import Tensor

from tritongemm.core.scaling import GRANULARITIES
from tritongemm.operations.factors import spread
from tritongemm.operations.torch_limits import takes_groups
from tritongemm.serving.grouped_operands import GroupedOperands
from tritongemm.serving.operand_checks import read_integers, wants_gradient
from tritongemm.serving.scaled_fallback import numbers
from tritongemm.serving.torch_fallback import converted, is_plain, wide_dtype


def grouped(operands: GroupedOperands) -> Tensor:
    """The product by PyTorch: its own grouped one where it has it, else of one group after another.

    Only the last asks the GPU for the groups' rows, and so can't be captured. Autocast changes no operand's type.
    """
    a, b = operands.a, operands.b
    # Of no rows the groups are not asked for, as a graph may be captured.
    if not a.numel() and not wants_gradient(*operands.tensors.values()):
        return a.new_empty((*a.shape[:-1], b.shape[2]), dtype=operands.out_dtype)
    with torch._C._DisableAutocast():
        return _multiply(operands)


def _multiply(operands: GroupedOperands) -> Tensor:
    a, b, offs, _, _, out_dtype, _ = operands
    if operands.masked:
        left, right = _plain_operands(operands)
        return converted(torch.bmm(left, right), out_dtype)
    if a.is_cuda:
        product = _own_product(operands)
        if product is not None:
            return product
    left, right = _plain_operands(operands)
    m, n = a.shape[0], b.shape[2]
    if a.is_meta:  # where there are no numbers of rows
        return a.new_empty((m, n), dtype=out_dtype)
    parts, first = [], 0
    for group, end in enumerate(read_integers(offs)):
        if end > first:
            parts.append(left[first:end] @ right[group])
        first = max(first, end)
    # They are joined, not written into one tensor: transforms of torch.func can't follow that.
    parts.append(left.new_zeros((max(m - first, 0), n)))
    return converted(torch.cat(parts), out_dtype)


def _own_product(operands: GroupedOperands) -> Tensor | None:
    """PyTorch's grouped product; None where it has none of these types."""
    a, b, offs, scale_a, scale_b, out_dtype, _ = operands
    has_own = operands.scalings == GRANULARITIES["row"] and a.dtype != torch.int8 and out_dtype == torch.bfloat16
    if has_own and b.mT.is_contiguous() and _aligned(a, b):
        assert scale_a is not None and scale_b is not None
        try:
            result: Tensor = torch._scaled_grouped_mm(
                a, b, scale_a.reshape(-1), scale_b, offs=offs, out_dtype=out_dtype, use_fast_accum=True
            )
            return result
        except RuntimeError:  # PyTorch has it on few architectures
            pass
    left, right = _plain_operands(operands) if scale_a is not None else (a, b)
    if left.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm") or not _aligned(left, right):
        return None
    try:
        product: Tensor = torch._grouped_mm(left, right, offs=offs)
    except RuntimeError:
        return None
    return converted(product, out_dtype)


def _aligned(a: Tensor, b: Tensor) -> bool:
    return takes_groups(a.shape[-1] * a.element_size(), b.shape[-1] * b.element_size())


def _plain_operands(operands: GroupedOperands) -> tuple[Tensor, Tensor]:
    """A and B without scale factors: multiplied by them, in bfloat16 on a GPU and in float32 elsewhere.

    Those that have none are widened where they are of eight bits, or where a wider result is asked for.
    """
    a, b, _, scale_a, scale_b, out_dtype, _ = operands
    if scale_a is None or scale_b is None:
        sums = wide_dtype(a, b, out_dtype)
        return (a, b) if is_plain(a, b, out_dtype) else (a.to(sums), b.to(sums))
    wide = torch.bfloat16 if a.is_cuda else torch.float32
    (of_a, of_b), k, n = operands.scalings, operands.k, b.shape[2]
    assert of_a is not None and of_b is not None
    flat = a.reshape(-1, a.shape[-1])
    factors = scale_a.reshape(-1, scale_a.shape[-1]) if of_a.depth else scale_a.reshape(-1)
    left = numbers(flat) * spread(factors, of_a, flat.shape[0], k)
    right = [numbers(w) * spread(of_w, of_b, n, k) for w, of_w in zip(b.mT, scale_b, strict=True)]
    return left.to(wide).view(*a.shape[:-1], k), torch.stack(right).to(wide).mT

"""The operation `grouped_mm`: products of different M in one call, and what PyTorch computes for it."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.support import Support
from tritongemm.operations import checks
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.factors import readings, spread, why_none
from tritongemm.operations.grouped_operands import GroupedOperands, check_extents, check_groups
from tritongemm.operations.linear_act import finished
from tritongemm.operations.linear_w4 import dequantize
from tritongemm.operations.scaled import numbers
from tritongemm.operations.torch_limits import takes_groups
from tritongemm.operations.torch_products import converted, is_plain, wide_dtype

_BF16 = torch.bfloat16


class Grouped(ProductOperation):
    """Each group's rows of A by the group's own matrix of B."""

    schema = (
        "grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype, "
        "str scale_layout='', str order_b='plain', str act='') -> Tensor"
    )
    operands = GroupedOperands
    sources: ClassVar = {"offsets": "offs", "counts": "offs"}

    def check(self, given: GroupedOperands) -> GroupedOperands:
        """Return the operands, which belong together."""
        check_groups(given)
        return given

    def tensors(self, checked: GroupedOperands) -> Mapping[str, Tensor]:
        """Return the operands as kernels read them: factors of blocks of A with K first; dense ones are not copied."""
        offs = checked.offs.contiguous()
        found = {"a": checked.a, "b": checked.b, "counts" if checked.masked else "offsets": offs}
        if checked.scale_b is None:
            return found
        if checked.scale_a is None:
            return found | {"scale_b": checked.scale_b.contiguous()}
        of_a, scaling = checked.scale_a, checked.scalings[0]
        if scaling is not None and scaling.layout == "groups":
            of_a = of_a.mT
        return found | {"scale_a": of_a.contiguous(), "scale_b": checked.scale_b.contiguous()}

    def read(self, checked: GroupedOperands) -> Reading | Support:
        """Return the problem with the rows spread evenly, of the family with such factors."""
        a, b = checked.a, checked.b
        (groups, _, n), k = b.shape, checked.k
        if groups < 2 or not a.numel() or not b.numel():
            return Support(f"{groups} groups, a {tuple(a.shape)}: there is no grouped product of these")
        if not a.is_contiguous():
            return Support(f"a has strides {a.stride()}; kernels take dense rows")
        if not (b.is_contiguous() or b.mT.is_contiguous()):
            return Support(f"b has strides {b.stride()}; kernels take dense weights")
        layout = "TN" if b.mT.is_contiguous() else "TT"
        try:
            several = Groups(groups, a.shape[1] if checked.masked else 0)
            plain = Problem(
                prod(a.shape[:-1]),
                n,
                k,
                *matrices(*checked.dtypes, layout=layout, order=checked.order_b),
                groups=several,
                epilogue=checked.act or "none",
            )
        except InputError as error:
            return Support(str(error))
        of_a, of_b = checked.scalings
        problems = readings(plain, (of_a,), (of_b,))
        why = "" if problems else why_none(plain, (of_a,), (of_b,))
        result = checked.shape, checked.result_type
        return Reading(problems[:1], self.tensors(checked), result, plain=plain, why_none=why)

    def infer(self, given: GroupedOperands) -> Tensor:
        """Return a result without contents."""
        check_extents(given)
        return given.a.new_empty(given.shape, dtype=given.result_type)

    def fallback(self, checked: GroupedOperands) -> Tensor:
        """Return PyTorch's product, and what follows it."""
        product = grouped(checked._replace(act=""))
        return finished(checked.act, product, checked.result_type, product.shape[-1] // 2) if checked.act else product


GROUPED = Grouped()


def grouped(operands: GroupedOperands) -> Tensor:
    """Return the product by PyTorch: its own grouped one where it has it, else of one group after another.

    Only the last asks the GPU for the groups' rows, and so can't be captured. Autocast changes no operand's type.
    """
    a, b = operands.a, operands.b
    # Of no rows the groups are not asked for, as a graph may be captured.
    if not a.numel() and not checks.wants_gradient(*operands.tensors.values()):
        return a.new_empty((*a.shape[:-1], b.shape[2]), dtype=operands.result_type)
    with torch._C._DisableAutocast():
        return _multiply(operands)


def _multiply(operands: GroupedOperands) -> Tensor:
    a, b, offs = operands[:3]
    out_dtype = operands.result_type
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
    for group, end in enumerate(checks.read_integers(offs)):
        if end > first:
            parts.append(left[first:end] @ right[group])
        first = max(first, end)
    # They are joined, not written into one tensor: transforms of torch.func can't follow that.
    parts.append(left.new_zeros((max(m - first, 0), n)))
    return converted(torch.cat(parts), out_dtype)


def _own_product(operands: GroupedOperands) -> Tensor | None:
    """Return PyTorch's grouped product; None where it has none of these types."""
    (a, b, offs, scale_a, scale_b), out_dtype = operands[:5], operands.result_type
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
    left, right = _plain_operands(operands) if scale_b is not None else (a, b)
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
    """Return a and B without scale factors: multiplied by them, in bfloat16 on a GPU and in float32 elsewhere.

    Those that have none are widened where they are of eight bits, or where a wider result is asked for.
    """
    (a, b, _, scale_a, scale_b), out_dtype = operands[:5], operands.result_type
    wide = torch.bfloat16 if a.is_cuda else torch.float32
    right: list[Tensor] = []
    if scale_b is not None and operands.is_of_four_bits:
        type_ = a.dtype if scale_a is None else wide
        right = [dequantize(w, of_w, operands.order_b, type_) for w, of_w in zip(b.mT, scale_b, strict=True)]
        if scale_a is None:
            return a, torch.stack(right).mT
    if scale_a is None or scale_b is None:
        sums = wide_dtype(a, b, out_dtype)
        return (a, b) if is_plain(a, b, out_dtype) else (a.to(sums), b.to(sums))
    (of_a, of_b), k, n = operands.scalings, operands.k, b.shape[2]
    assert of_a is not None and of_b is not None
    flat = a.reshape(-1, a.shape[-1])
    factors = scale_a.reshape(-1, scale_a.shape[-1]) if of_a.depth else scale_a.reshape(-1)
    left = numbers(flat) * spread(factors, of_a, flat.shape[0], k)
    right = right or [numbers(w) * spread(of_w, of_b, n, k) for w, of_w in zip(b.mT, scale_b, strict=True)]
    return left.to(wide).view(*a.shape[:-1], k), torch.stack(right).to(wide).mT

"""The operation `bmm`: equal products side by side, with scale factors or without, and what PyTorch computes for it.

PyTorch's functions are bound when this is imported, since a capture puts others in their place, which count calls.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.support import Support
from tritongemm.operations.checks import check_bias, check_eight_bits, check_fit, check_memory, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading, ReadyCall, Strides
from tritongemm.operations.factors import agreeing, describe_known, of_each, readings, why_none
from tritongemm.operations.scaled import TorchScaled
from tritongemm.operations.scaled_operands import ScaledOperands, read_product
from tritongemm.operations.torch_products import DTYPE_NAMES, converted, is_plain, output_dtype, wide_dtype
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout

_NO_TENSORS = ("out_dtype", "scale_layout")


class BatchOperands(NamedTuple):
    """The arguments of `bmm`, and the scale factors of a and b.

    Factors are of rows of a, [B, M], and of columns of b, [B, N]; those along K [B, M, groups] and [B, groups, …], or
    in an order that `scale_layout` names.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    scale_layout: str = ""
    out: Tensor | None = None  # behind those of the traced operation, which gives new memory

    @property
    def dtypes(self) -> tuple[str, str]:
        """Our names of the types of a and b, "" of those that we have none for; bytes with factors are fp4."""
        names = (DTYPE_NAMES.get(self.a.dtype, ""), DTYPE_NAMES.get(self.b.dtype, ""))
        are_fp4 = self.scale_a is not None and self.a.dtype == self.b.dtype == torch.uint8
        return ("fp4e2m1", "fp4e2m1") if are_fp4 else names

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result."""
        return _result_type(self.a, self.scale_a, self.out_dtype)

    @property
    def k(self) -> int:
        """Elements along K, of which several may share a byte."""
        name = self.dtypes[0]
        return int(self.a.shape[-1]) * (DTYPES[name].packed if name else 1)


def _operands_of_scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **more: Any,
) -> BatchOperands:
    """Return the operands of `scaled_bmm`."""
    return BatchOperands(a, b, bias, out_dtype, scale_a, scale_b, **more)


class Batched(ProductOperation):
    """A @ B (+ bias) for each product of a batch."""

    schema = (
        "bmm(Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? scale_a=None, "
        "Tensor? scale_b=None, str scale_layout='') -> Tensor"
    )
    operands = BatchOperands
    calls: ClassVar = {"scaled_bmm": _operands_of_scaled}

    def check(self, given: BatchOperands) -> BatchOperands:
        """Return the operands with their vectors flat."""
        named = given._asdict()
        check_tensors({n: t for n, t in named.items() if n in ("a", "b") or (n not in _NO_TENSORS and t is not None)})
        if (given.scale_a is None) != (given.scale_b is None):
            raise InputError("scale_a and scale_b go together")
        if given.scale_a is not None and given.dtypes != ("fp4e2m1", "fp4e2m1"):
            check_eight_bits(given.a, given.b, given.result_type)
        if given.scale_layout:
            registry.get(ScaleLayout, given.scale_layout)
        return _check_shapes(given)

    def tensors(self, checked: BatchOperands) -> Mapping[str, Tensor]:
        """Return the operands as kernels read them: vectors may be copies."""
        return {name: tensor for name, tensor in super().tensors(checked).items() if name != "out"}

    def read(self, checked: BatchOperands) -> Reading | Support:
        """Return the problems of all families with such factors, of products of their own and of shared operands."""
        a, b, bias, _, scale_a, scale_b, layout, out = checked
        if not a.numel() or not b.numel():
            return Support("an operand is empty")
        result = checked.result_type
        dtypes = (*checked.dtypes, DTYPE_NAMES.get(result, ""))
        unknown = {str(dtype) for dtype, name in zip((a.dtype, b.dtype, result), dtypes, strict=True) if not name}
        if unknown:
            return Support(f"no kernels for {', '.join(sorted(unknown))}")
        found = {
            "a": _matrix(a),
            "b": _matrix(b),
            "c": (True, Strides(b.shape[2], a.shape[1] * b.shape[2])) if out is None else _matrix(out),
        }
        for name, layout_of in found.items():
            if layout_of is None or (name == "c" and not layout_of[0]):
                return Support(f"{name} has strides that no kernel reads or writes")
        (row_a, of_a), (row_b, of_b), (_, of_c) = (one for one in found.values() if one is not None)
        (batch, m, _), n, k = a.shape, b.shape[2], checked.k
        one = [name for name, its in (("a", of_a), ("b", of_b)) if batch > 1 and its.apart == 0]
        if len(one) > 1:
            return Support("all products are the same one")
        operands = matrices(*dtypes, layout="NT"[row_a] + "NT"[row_b])
        plain = Problem(m, n, k, *operands, "none" if bias is None else "n", batch)
        strides = {"a": of_a, "b": of_b, "c": of_c}
        for name, beside in {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}.items():
            if beside is not None and batch > 1:
                strides[name] = Strides(0, beside.stride(0) if beside.dim() > 1 else 0)
        if bias is not None and DTYPE_NAMES.get(bias.dtype) != plain.bias_dtype.name:
            return Support(f"the bias is {bias.dtype}; kernels take {plain.bias_dtype.torch}")
        # A kernel for operands of their own serves shared ones too.
        shared = {name: getattr(plain, name)._replace(shared=True) for name in one}
        problems, why = tuple(dict.fromkeys((replace(plain, **shared), plain))), ""
        if scale_a is not None and scale_b is not None:
            ways = agreeing(
                of_each(scale_a, (batch, m, k), layout), of_each(scale_b, (batch, n, k), layout, turned=True)
            )
            problems = tuple(problem for each in problems for problem in readings(each, *ways))
            why = "" if problems else why_none(plain, *ways)
        return Reading(problems, self.tensors(checked), ((batch, m, n), result), strides, plain, why)

    def is_cast(self, given: BatchOperands) -> bool:
        """Return whether autocast casts the operands, as those of ``torch.bmm``, but none with factors."""
        return given.scale_a is None

    def infer(self, given: BatchOperands) -> Tensor:
        """Return a result without contents."""
        _check_extents(given.a, given.b)
        shape = given.a.shape[0], given.a.shape[1], given.b.shape[2]
        return given.a.new_empty(shape, dtype=given.result_type)

    def fallback(self, checked: BatchOperands) -> Tensor:
        """Return PyTorch's products."""
        return torch_bmm(checked)

    def make_fallback(self, checked: BatchOperands) -> ReadyCall:
        """Return what computes PyTorch's products; on a CPU operands are looked at each time."""
        return _torch_products if checked.a.is_cuda else super().make_fallback(checked)


BATCHED = Batched()


def _check_shapes(operands: BatchOperands) -> BatchOperands:
    """Return the operands, vectors as [N] or [B, N]; factors along K as they are."""
    a, b, bias, _, scale_a, scale_b, layout, _ = operands
    _check_extents(a, b)
    batch, m, n = a.shape[0], a.shape[1], b.shape[2]
    check_out(operands)
    added = None if bias is None or (bias.dim() == 3 and bias.shape[1] != 1) else _vector(bias, batch, n)
    if bias is not None and added is None:
        raise InputError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; it may be [{n}], [{batch}, {n}] or [{batch}, 1, {n}]"
        )
    check_bias(bias)
    return operands._replace(
        bias=added,
        scale_a=_factors("scale_a", scale_a, batch, m, operands.k, layout),
        scale_b=_factors("scale_b", scale_b, batch, n, operands.k, layout, turned=True),
    )


def _check_extents(a: Tensor, b: Tensor) -> None:
    """Refuse operands that are no batches of matrices with one K."""
    fit = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    check_fit(fit, "[B, M, K] and [B, K, N]", a=a, b=b)


def check_out(operands: BatchOperands) -> None:
    """Refuse memory for the result that is none for it.

    Raises:
        InputError: names it, and what the result is.
    """
    a, b, bias, wanted, scale_a, scale_b, _, out = operands
    if out is not None:
        shape, dtype = (a.shape[0], a.shape[1], b.shape[2]), _result_type(a, scale_a, wanted)
        check_memory(out, shape, dtype, a, b, bias, scale_a, scale_b)


def _result_type(a: Tensor, scale_a: Tensor | None, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type of a result; PyTorch 2.10 can't trace a property of a named tuple."""
    return torch.bfloat16 if wanted is None and scale_a is not None else output_dtype(a, wanted)


def _factors(
    name: str, scales: Tensor | None, batch: int, rows: int, k: int, layout: str, turned: bool = False
) -> Tensor | None:
    """Return factors along K as they are, others as a vector for each product; `turned` ones have K first, as b has."""
    if scales is None:
        return None
    ways = of_each(scales, (batch, rows, k), layout, turned)
    if any(way.depth for way in ways):
        return scales
    flat = _vector(scales, batch, rows)
    if flat is None or not ways:
        known = describe_known(rows, k, "N" if turned else "M", turned, layout).removeprefix("one factor, ")
        raise InputError(
            f"{name} is {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}; of each product it "
            f"may be {known}"
        )
    return flat


def _vector(vector: Tensor, batch: int, length: int) -> Tensor | None:
    """Return a vector for each product, [B, length], or one for all, [length]; None where it is neither."""
    flat = vector
    if vector.dim() == 3 and 1 in vector.shape[1:]:
        flat = vector.squeeze(1) if vector.shape[2] == length else vector.squeeze(2)
    if tuple(flat.shape) not in ((length,), (batch, length)):
        return None
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _matrix(t: Tensor) -> tuple[bool, Strides] | None:
    """Return whether the matrices of a batch are row-major, and their strides; None where neither is dense."""
    batch, rows, cols = t.shape
    apart, of_rows, of_cols = t.stride()
    apart = apart if batch > 1 else rows * cols
    for row_major, inner, step, outer, width in (
        (True, of_cols, of_rows, rows, cols),
        (False, of_rows, of_cols, cols, rows),
    ):
        lead = step if outer > 1 else width  # the stride of a dimension of one element says nothing
        if (inner == 1 or width == 1) and lead >= width and apart >= 0:
            return row_major, Strides(lead, apart if batch > 1 else outer * lead)
    return None


_bmm, _baddbmm = torch.bmm, torch.baddbmm
_torch_scaled = lru_cache(maxsize=256)(TorchScaled)  # which knows what PyTorch refused before


def torch_bmm(operands: BatchOperands) -> Tensor:
    """Return A @ B for each product, scaled, with the bias: in the result's dtype where PyTorch can, else wider."""
    a, b, bias, out_dtype, _, _, _, out = operands
    added = None if bias is None else bias.unsqueeze(-2)
    if operands.scale_a is not None:
        product = _scaled(operands)
        return product if out is None else out.copy_(product)
    if is_plain(a, b, out_dtype) and (bias is None or bias.dtype == a.dtype):
        given = {} if out is None else {"out": out}
        result: Tensor = _bmm(a, b, **given) if added is None else _baddbmm(added, a, b, **given)
        return result
    wanted = operands.result_type
    wide = wide_dtype(a, b, wanted)
    product = _bmm(a.to(wide), b.to(wide))
    product = converted(product if added is None else product + added, wanted)
    return product if out is None else out.copy_(product)


def _scaled(operands: BatchOperands) -> Tensor:
    """Return the products of a batch with scale factors, one after another: PyTorch has no call of all of them."""
    a, b, bias, _, scale_a, scale_b, layout, _ = operands
    assert scale_a is not None and scale_b is not None
    (batch, m, _), n = a.shape, b.shape[2]
    wanted = operands.result_type
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
        products.append(_torch_scaled(read_product(one))(*one))
    with torch._C._DisableAutocast():  # which has `stack` refuse 16 bits other than its own
        return torch.stack(products)


def _of_product(scales: Tensor, product: int) -> Tensor:
    return scales[product] if scales.dim() > 1 else scales


def _torch_products(*given: Any) -> Tensor:
    return torch_bmm(_check_shapes(BatchOperands(*given)))

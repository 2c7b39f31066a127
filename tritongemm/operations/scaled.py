"""The operation `scaled_mm`: a product of operands with scale factors, and what PyTorch computes for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.problem import PLAIN
from tritongemm.core.scaling import Scaling
from tritongemm.core.support import Support
from tritongemm.numerics.scale_factors import fp4_as_numbers
from tritongemm.operations import scaled_operands
from tritongemm.operations.checks import wants_gradient
from tritongemm.operations.contract import ProductOperation, Reading, ReadyCall, check_factors_are_numbers
from tritongemm.operations.factors import spread
from tritongemm.operations.torch_limits import PADDED_GROUPS, ROW_MULTIPLE
from tritongemm.operations.torch_products import linear
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import WeightLayout

_Scaled = getattr(torch.nn.functional, "ScalingType", None)  # It exists since PyTorch 2.10.


class CheckedScaled(NamedTuple):
    """Operands of `scaled_mm`, and what they mean."""

    given: scaled_operands.ScaledOperands
    product: scaled_operands.ScaledProduct


class ScaledOperation(ProductOperation):
    """(A * scale_a) @ (B * scale_b).T (+ bias)."""

    schema = (
        "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
        'ScalarType out_dtype=bfloat16, str order_b="plain", str scale_layout="") -> Tensor'
    )
    operands = scaled_operands.ScaledOperands

    def check(self, given: scaled_operands.ScaledOperands) -> CheckedScaled:
        """Return the operands with what they mean."""
        return CheckedScaled(given, scaled_operands.read_product(given))

    def tensors(self, checked: CheckedScaled) -> Mapping[str, Tensor]:
        """Return the operands as they are."""
        return super().tensors(checked.given._replace(out=None))

    def read(self, checked: CheckedScaled) -> Reading | Support:
        """Return the problems of all families with such factors."""
        given, product = checked
        if not product.dense:
            return Support(f"b has strides {given.b.stride()}; kernels take a dense weight")
        if not product.m:
            return Support("an operand is empty")
        if not given.a.is_contiguous() or not (given.bias is None or given.bias.is_contiguous()):
            return Support("a or the bias is not contiguous")
        if given.out is not None and not given.out.is_contiguous():
            return Support("the result's memory is not contiguous")
        if given.bias is not None and given.bias.dtype != given.out_dtype:
            return Support(f"the bias is {given.bias.dtype}; kernels take {given.out_dtype}")
        result, problems = (*given.a.shape[:-1], product.n), product.problems()
        why_none = "" if problems else product.why_none()
        return Reading(
            problems, self.tensors(checked), (result, given.out_dtype), plain=product.plain, why_none=why_none
        )

    def infer(self, given: scaled_operands.ScaledOperands) -> Tensor:
        """Return a result without contents."""
        n = given.b.shape[1 if scaled_operands.is_transposed(given.a, given.b) else 0]
        return given.a.new_empty((*given.a.shape[:-1], n), dtype=given.out_dtype)

    def fallback(self, checked: CheckedScaled) -> Tensor:
        """Return PyTorch's product."""
        return TorchScaled(checked.product)(*checked.given)

    def make_fallback(self, checked: CheckedScaled) -> ReadyCall:
        """Return PyTorch's product as a call that remembers what PyTorch refused."""
        compute = TorchScaled(checked.product)

        def multiply(*given: Any) -> Tensor:
            operands = scaled_operands.ScaledOperands(*given)
            scaled_operands.check_devices(operands)  # in a key the meta device is as the CPU
            check_factors_are_numbers(operands)
            return compute(*given)

        return multiply


SCALED = ScaledOperation()


class TorchScaled:
    """PyTorch's product of operands with scales: its own scaled one where it takes them, else one of plain numbers.

    PyTorch is asked for its own at the first call, and not again once it refused.
    """

    def __init__(self, product: scaled_operands.ScaledProduct) -> None:
        self._product = product
        self._native = product.m > 0 and product.order_b == PLAIN and product.dtypes[0].startswith("fp8")

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        *_: object,
    ) -> Tensor:
        """Return the result, [..., N], of the operands' types under autocast too; no rows launch nothing."""
        if not self._product.m and not wants_gradient(scale_a, scale_b, bias):
            return a.new_empty((*a.shape[:-1], self._product.n), dtype=out_dtype)
        with torch._C._DisableAutocast():
            return self._multiply(a, b, scale_a, scale_b, bias, out_dtype)

    def _multiply(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        weight, of_weight = self._product.weight(scaled_operands.ScaledOperands(a, b, scale_a, scale_b))
        rows = a.reshape(-1, a.shape[-1])
        result = self._try_native(rows, weight, scale_a, of_weight, bias, out_dtype) if self._native else None
        if result is None:
            result = self._compute(rows, weight, scale_a, of_weight, bias, out_dtype)
        return result.view(*a.shape[:-1], result.shape[-1])

    def _try_native(
        self, a: Tensor, w: Tensor, scale_a: Tensor, scale_w: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor | None:
        """Return PyTorch's own scaled product; None where it has none for these operands."""
        along_k = [scaling.depth > 0 for scaling in (self._product.scalings_a[0], self._product.scalings_b[0])]
        if not a.is_cuda or along_k[0] != along_k[1]:
            return None
        try:
            if all(along_k):
                return self._in_blocks(a.contiguous(), w.t(), scale_a, scale_w, bias, out_dtype)
            of_a, of_b = _for_rows(self._product, scale_a, scale_w)
            added = None if bias is None else bias.to(out_dtype)
            return torch._scaled_mm(a.contiguous(), w.t(), of_a, of_b, bias=added, out_dtype=out_dtype)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError):  # whatever it refuses, plain numbers can be multiplied
            self._native = False
            return None

    def _in_blocks(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_w: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Return the product with float32 factors for 128 numbers along K, on GPUs whose library has it.

        PyTorch wants factors of 1 x 128 with rows the fastest, those of 128 x 128 with K the fastest and padded.
        """
        if out_dtype != torch.bfloat16:
            raise ValueError("PyTorch gives bfloat16 alone")
        square = self._product.scalings_b[0].rows > 1
        rows, missing = a.shape[0], -a.shape[0] % ROW_MULTIPLE
        of_a = scale_a.t().contiguous().t()
        if missing:  # rows of zeros, whose result is not read
            a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)  # it pads no fp8
            of_a = torch.nn.functional.pad(scale_a.t(), (0, missing)).t()
        groups = scale_w.shape[1]
        padding = -groups % PADDED_GROUPS if square else 0
        of_w = torch.nn.functional.pad(scale_w, (0, padding)).t() if square else scale_w.t().contiguous()
        if _Scaled is None:
            older = of_w[:groups] if square else of_w
            result = torch._scaled_mm(a, b, of_a, older, out_dtype=out_dtype)
        else:
            vector, blocks = _Scaled.BlockWise1x128, _Scaled.BlockWise128x128
            newer, kind = (of_w, blocks) if square else (of_w.t(), vector)
            scaled = torch.nn.functional.scaled_mm
            result = scaled(a, b, of_a, vector, newer, kind, output_dtype=out_dtype)
        result = result[:rows]
        return result if bias is None else (result + bias).to(out_dtype)

    def _compute(
        self, a: Tensor, w: Tensor, scale_a: Tensor, scale_w: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Return the product of plain numbers; factors that do not change along K are applied to it, others before."""
        product = self._product
        scaling_a, scaling_w = product.scalings_a[0], product.scalings_b[0]
        if product.order_b != PLAIN:
            w = registry.get(WeightLayout, product.order_b).unpack(w.t()).t()
        of_a = spread(scale_a, scaling_a, product.m, product.k)
        of_w = spread(scale_w, scaling_w, product.n, product.k)
        if scaling_a.depth or scaling_w.depth:
            result = torch.nn.functional.linear(numbers(a) * of_a, numbers(w) * of_w)
        else:
            result = _sums(a, w.contiguous()) * of_a * of_w.t()
        return (result if bias is None else result + bias).to(out_dtype)


def _for_rows(product: scaled_operands.ScaledProduct, scale_a: Tensor, scale_w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors in the shapes of ``torch._scaled_mm``: scalars, or [M, 1] and [1, N]."""
    scaling_a, scaling_w = product.scalings_a[0], product.scalings_b[0]
    if not scaling_a.rows and not scaling_w.rows:
        return scale_a.reshape(()), scale_w.reshape(())
    return _one_for_each(scale_a, scaling_a, product.m), _one_for_each(scale_w, scaling_w, product.n).t()


def _one_for_each(scales: Tensor, scaling: Scaling, rows: int) -> Tensor:
    column = scales.reshape(-1, 1)
    return column if scaling.rows else column.expand(rows, 1).contiguous()


def _sums(a: Tensor, w: Tensor) -> Tensor:
    """Return a @ w.T without factors, not rounded: in int32 of int8, else in float32."""
    if a.dtype == torch.int8:
        return linear(a, w, None, torch.int32)
    if a.dtype != torch.uint8:  # which is fp4 here, and a number to PyTorch
        try:
            return linear(a, w, None, torch.float32)
        except RuntimeError:  # PyTorch may have no product of fp8 for this GPU or these sizes.
            pass
    return torch.nn.functional.linear(numbers(a), numbers(w))


def numbers(tensor: Tensor) -> Tensor:
    """Return an operand's numbers in float32, two of a byte of fp4."""
    if tensor.element_size() > 1 or tensor.dtype not in (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8)):
        return tensor.float()
    return fp4_as_numbers(tensor.view(torch.uint8), torch.float32)

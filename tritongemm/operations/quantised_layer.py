"""The operation `linear_fp8`: a linear layer of a quantised weight, whose activations are quantised on the way."""

from typing import NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.support import Support
from tritongemm.operations import microscaling
from tritongemm.operations.checks import check_fit, check_tensors
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.factors import (
    EXPONENTS,
    describe_known,
    find_scalings,
    of_layer,
    quantised_by,
    readings,
    why_none,
)
from tritongemm.operations.quantisation import by_torch
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands, dtype_name
from tritongemm.operations.torch_products import DTYPE_NAMES


class LayerOperands(NamedTuple):
    """The arguments of `linear_fp8`."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    unquantized: Tensor | None = None

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result."""
        return self.x.dtype if self.out_dtype is None else self.out_dtype


class CheckedLayer(NamedTuple):
    """Operands of `linear_fp8`, and to which granularity activations are quantised: ``row``, ``block`` or ``mx``."""

    given: LayerOperands
    granularity: str


class QuantisedLayer(ProductOperation):
    """X @ (weight * weight_scale).T (+ bias), of quantised x."""

    schema = (
        "linear_fp8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
        "Tensor? unquantized=None) -> Tensor"
    )
    operands = LayerOperands

    def check(self, given: LayerOperands) -> CheckedLayer:
        """Return the operands, which belong together."""
        x, weight, scale, *_, unquantized = given
        check_tensors({"x": x, "weight": weight, "weight_scale": scale})
        if not x.dim() or not x.shape[-1]:
            raise InputError(
                f"x is {tuple(x.shape)}; activations are [..., K], and there is nothing to multiply without K"
            )
        _check_unquantized(x, weight, unquantized)
        return CheckedLayer(given, _granularity(weight, scale))

    def read(self, checked: CheckedLayer) -> Reading | Support:
        """Return the problems of all families with such a weight, for each layout of the activations' factors."""
        x, weight, scale, bias, *_ = checked.given
        q, out = dtype_name("weight", weight), DTYPE_NAMES.get(checked.given.result_type, "")
        k = weight.shape[1] * DTYPES[q].packed
        m, n = x.numel() // k, weight.shape[0]
        if not m or not n or not out:
            return Support("an operand is empty" if out else f"no kernels for {checked.given.result_type}")
        plain = Problem(m, n, k, *matrices(q, c=out, layout="TN"), bias="none" if bias is None else "n")
        ways = of_layer(scale, (m, n, k))
        problems, result = readings(plain, *ways), (*x.shape[:-1], n)
        why = "" if problems else why_none(plain, *ways)
        return Reading(problems, {"a": x, "b": weight}, (result, checked.given.result_type), plain=plain, why_none=why)

    def infer(self, given: LayerOperands) -> Tensor:
        """Return a result without contents."""
        x, weight = given.x, given.weight
        fit = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] * microscaling.packed(weight)
        check_fit(fit, "[..., K] and [N, K]", x=x, weight=weight)
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=given.result_type)

    def fallback(self, checked: CheckedLayer) -> Tensor:
        """Return PyTorch's product of activations that PyTorch quantises."""
        (x, weight, scale, bias, *_), granularity = checked
        q, of_q = by_torch(x, granularity, weight.dtype, "rows")
        factors = factors_of_rows(weight, scale) if granularity == "row" else scale
        one = ScaledOperands(q, weight, of_q, factors, bias, checked.given.result_type)
        return SCALED.fallback(SCALED.check(one))


QUANTISED_LAYER = QuantisedLayer()


def factors_of_rows(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return a factor for each row of the weight, as kernels read them, also where all share one."""
    if weight_scale.numel() != 1:
        return weight_scale
    return weight_scale.reshape(1).expand(weight.shape[0]).contiguous()


def _check_unquantized(x: Tensor, weight: Tensor, unquantized: Tensor | None) -> None:
    """Refuse an unquantised weight that is not of this layer."""
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


def _granularity(weight: Tensor, weight_scale: Tensor) -> str:
    """Return the granularity of activations that are quantised for a weight."""
    if weight.dim() != 2:
        raise InputError(f"weight is {tuple(weight.shape)}; a linear layer's is [N, K]")
    n, k = weight.shape[0], weight.shape[1] * (microscaling.packed(weight) if weight_scale.dtype in EXPONENTS else 1)
    found = find_scalings(weight_scale, n, k)
    if not found:
        raise InputError(
            f"weight_scale is {weight_scale.dtype} {tuple(weight_scale.shape)} with strides {weight_scale.stride()}; "
            f"it may be {describe_known(n, k, 'N')}"
        )
    return quantised_by(weight_scale, found)

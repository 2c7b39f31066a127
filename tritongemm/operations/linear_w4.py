"""The operation `linear_w4`: a linear layer whose weight has four bits a number and scale factors along K."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import INT4_ZERO
from tritongemm.core.errors import InputError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import PLAIN, Operand, Problem, matrices
from tritongemm.core.scaling import MX_DEPTH, NV_DEPTH, SCALED_BLOCK, WEIGHT_DEPTHS
from tritongemm.core.support import Support
from tritongemm.numerics import scale_factors
from tritongemm.operations.checks import SCALED_RESULTS, check_bias, check_fit, check_tensors, check_values
from tritongemm.operations.contract import ProductOperation, Reading
from tritongemm.operations.factors import EXPONENTS, Ways, find_scalings, of_four_bits, readings, spread, why_none
from tritongemm.operations.torch_products import DTYPE_NAMES, linear
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import WeightLayout

ACTIVATIONS = (torch.bfloat16, torch.float16)
QUANTISED = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8")
    if hasattr(torch, name)
)


class FourBitOperands(NamedTuple):
    """The arguments of `linear_w4`."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    order: str = PLAIN
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_x: Tensor | None = None

    @property
    def result_type(self) -> torch.dtype:
        """The type of the result."""
        return self.wide if self.out_dtype is None else self.out_dtype

    @property
    def wide(self) -> torch.dtype:
        """The type of factors of int4: that of activations without factors, bfloat16 beside those that have some."""
        return self.x.dtype if self.scale_x is None else torch.bfloat16


class CheckedFourBits(NamedTuple):
    """Operands of `linear_w4`, the weight as a problem's B, and the ways to read the factors of x."""

    given: FourBitOperands
    b: Operand
    of_x: Ways | tuple[None]


class FourBitLayer(ProductOperation):
    """X @ (weight * scale).T (+ bias), of a weight of int4 or fp4."""

    schema = (
        'linear_w4(Tensor x, Tensor weight, Tensor scale, str order="plain", Tensor? bias=None, '
        "ScalarType? out_dtype=None, Tensor? scale_x=None) -> Tensor"
    )
    operands = FourBitOperands
    sources: ClassVar = {"a": "x", "b": "weight", "scale_a": "scale_x", "scale_b": "scale"}

    def check(self, given: FourBitOperands) -> CheckedFourBits:
        """Return the operands with what the weight is."""
        x, weight, scale, order, bias, _, scale_x = given
        others = {"bias": bias, "scale_x": scale_x}
        every = {"x": x, "weight": weight, "scale": scale} | {k: one for k, one in others.items() if one is not None}
        check_tensors(every)
        if x.dtype not in (ACTIVATIONS if scale_x is None else QUANTISED):
            more = "" if scale_x is None else ", or with a scale_x fp8 or int8"
            raise InputError(f"x is {x.dtype}; activations beside four bits are bfloat16 or float16{more}")
        b = read_weight(weight, scale, given.wide, order)
        n, k = weight.shape[0], 2 * weight.shape[1]
        if not x.dim() or x.shape[-1] != k:
            raise InputError(f"x is {tuple(x.shape)}; beside a weight of {k} numbers along K it is [..., {k}]")
        if bias is not None and tuple(bias.shape) != (n,):
            raise InputError(f"bias is {tuple(bias.shape)}; it has a value for each of N={n}")
        check_bias(bias)
        if given.result_type not in SCALED_RESULTS:
            raise InputError(f"out_dtype is {given.out_dtype}; it may be {', '.join(map(str, SCALED_RESULTS))}")
        return CheckedFourBits(given, b, (None,) if scale_x is None else _factors_of_x(x, scale_x))

    def tensors(self, checked: CheckedFourBits) -> Mapping[str, Tensor]:
        """Return the operands as they are."""
        return super().tensors(checked.given)

    def read(self, checked: CheckedFourBits) -> Reading | Support:
        """Return the problems of all families with such a weight."""
        (x, weight, scale, _, bias, _, _), b, of_x = checked
        out = checked.given.result_type
        for name, tensor in (("x", x), ("weight", weight), ("scale", scale)):
            if not tensor.is_contiguous():
                return Support(f"{name} has strides {tensor.stride()}; kernels take dense rows")
        if not x.numel():
            return Support("an operand is empty")
        if bias is not None and (bias.dtype != out or not bias.is_contiguous()):
            return Support(f"the bias is {bias.dtype} with strides {bias.stride()}; kernels take {out}, dense")
        n, k = weight.shape[0], x.shape[-1]
        of_a, _, of_c = matrices(DTYPE_NAMES[x.dtype], c=DTYPE_NAMES[out])
        plain = Problem(x.numel() // k, n, k, of_a, b._replace(scaling=None), of_c, "none" if bias is None else "n")
        ways = of_x, (b.scaling,)
        problems, result = readings(plain, *ways), ((*x.shape[:-1], n), out)
        why = "" if problems else why_none(plain, *ways)
        return Reading(problems, self.tensors(checked), result, plain=plain, why_none=why, vector=x.dim() == 1)

    def infer(self, given: FourBitOperands) -> Tensor:
        """Return a result without contents."""
        x, weight = given.x, given.weight
        fit = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == 2 * weight.shape[1]
        check_fit(fit, "[..., K] and [N, K / 2]", x=x, weight=weight)
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=given.result_type)

    def fallback(self, checked: CheckedFourBits) -> Tensor:
        """Return PyTorch's product with the weight in x's type, or in float32 where that has no such powers of two."""
        (x, weight, scale, order, bias, _, scale_x), b, of_x = checked
        check_values(scale=scale, **({} if scale_x is None else {"scale_x": scale_x}))
        if not x.numel():
            return self.infer(checked.given)
        if scale_x is not None and of_x[0] is not None:
            k = x.shape[-1]
            factors = scale_x.reshape(-1, scale_x.shape[-1]) if of_x[0].depth else scale_x
            x = (x.reshape(-1, k).float() * spread(factors, of_x[0], x.numel() // k, k)).view(x.shape)
            return linear(x, dequantize(weight, scale, order, x.dtype), bias, checked.given.result_type)
        wide = torch.float32 if b.dtype == "fp4e2m1" and x.dtype == torch.float16 else x.dtype
        with torch._C._DisableAutocast():
            w = dequantize(weight, scale, order, wide)
            return linear(x.to(wide), w, bias, checked.given.result_type)


FOUR_BIT_LAYER = FourBitLayer()


def _factors_of_x(x: Tensor, scale_x: Tensor) -> Ways:
    """Return the ways to read factors of activations: a float32 for each row or 1 x 128, or a power of two per 32."""
    k = x.shape[-1]
    rows = x.numel() // k
    of_rows = scale_x.numel() == rows and scale_x.dtype == torch.float32
    flat = scale_x.flatten() if of_rows else scale_x.flatten(0, -2) if scale_x.dim() > 2 else scale_x
    ways = tuple(way for way in find_scalings(flat, rows, k) if way.rows == 1)
    if not ways:
        wanted = f"of {rows} rows, [..., {cdiv(k, SCALED_BLOCK)}] float32 or [..., {cdiv(k, MX_DEPTH)}] e8m0"
        raise InputError(f"scale_x is {scale_x.dtype} {tuple(scale_x.shape)}; it has a float32 for each {wanted}")
    return ways


def read_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype, order: str) -> Operand:
    """Return what a weight [N, K / 2] with its scale factors is, as a problem's B, beside activations of a type.

    Raises:
        InputError: they do not belong together; says what they may be.
    """
    if weight.dtype != torch.uint8 or weight.dim() != 2 or not weight.numel():
        raise InputError(f"weight is {weight.dtype} {tuple(weight.shape)}; it is uint8 [N, K / 2], two numbers a byte")
    n, k = weight.shape[0], 2 * weight.shape[1]
    found = of_four_bits(scale, n, k, dtype)
    if found is None:
        if k % MX_DEPTH:
            raise InputError(f"weight is {tuple(weight.shape)}: K={k} is no multiple of {MX_DEPTH}, the shortest group")
        groups = " or ".join(f"{k // each}" for each in reversed(WEIGHT_DEPTHS) if not k % each)
        raise InputError(
            f"scale is {scale.dtype} {tuple(scale.shape)}; for N={n}, K={k} it is [{groups} groups of 128, 64 or 32, "
            f"{n}] of int4, with zero points [groups, 2, {n}], or of fp4 [{n}, {k // MX_DEPTH}] e8m0 or "
            f"[{k // NV_DEPTH}, {n}] bfloat16: groups divide K"
        )
    b = Operand(found[0], row_major=False, order=order, scaling=found[1])
    if order != PLAIN:
        a = "fp16" if dtype == torch.float16 else "bf16"
        possible = registry.get(WeightLayout, order).supports(Problem(1, n, k, Operand(a), b, Operand(a)))
        if not possible:
            raise InputError(f"{possible}; weight has N {n} and K {k}")
    return b


def dequantize(weight: Tensor, scale: Tensor, order: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers [N, K] of a weight times their scale factors, which are rounded once."""
    if order != PLAIN:
        weight = registry.get(WeightLayout, order).unpack(weight.t()).t()
    bits = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
    if scale.dtype in EXPONENTS:
        numbers, factors = scale_factors.fp4_of_bits(bits, dtype), scale_factors.exponents_as_numbers(scale).to(dtype)
    elif scale.dim() == 2 and bits.shape[-1] == NV_DEPTH * scale.shape[0]:
        numbers, factors = scale_factors.fp4_of_bits(bits, dtype), scale.t().to(dtype)
    else:
        numbers, factors = bits.to(dtype) - INT4_ZERO, (scale if scale.dim() == 2 else scale[:, 0]).t().to(dtype)
        if scale.dim() == 3:
            numbers = numbers - scale[:, 1].t().to(dtype).repeat_interleave(numbers.shape[1] // scale.shape[0], 1)
    return (numbers.unflatten(-1, (factors.shape[-1], -1)) * factors[..., None]).flatten(-2)

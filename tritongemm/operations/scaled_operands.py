"""The operands of `scaled_mm`, and which product they are of."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Problem, matrices
from tritongemm.core.scaling import Scaling
from tritongemm.operations.checks import SCALED_RESULTS, check_bias, check_tensors
from tritongemm.operations.factors import agreeing, describe_known, find_scalings, readings, why_none
from tritongemm.operations.torch_products import DTYPE_NAMES
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout, WeightLayout

_PACKED_FP4 = torch.uint8  # two numbers a byte, where PyTorch's own type is not used


class ScaledOperands(NamedTuple):
    """The arguments of `scaled_mm`."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    order_b: str = PLAIN
    scale_layout: str = ""
    out: Tensor | None = None  # dense memory that a server has for the result; the function gives new memory


@dataclass(frozen=True)
class ScaledProduct:
    """What the operands of one call mean; holds for all of their shapes, strides and dtypes."""

    # m, n, k: sizes; an M of 0 is a product without a result
    m: int
    n: int
    k: int
    transposed: bool  # b is a view [K, N] of the weight, and scale_b one of its factors
    dtypes: tuple[str, str, str]  # names of the types of a, b and the result
    # scalings_a, scalings_b: the ways in which the scale factors can be read, which mean the same
    scalings_a: tuple[Scaling, ...]
    scalings_b: tuple[Scaling, ...]
    bias: str  # `n` or `none`
    order_b: str  # order of b in memory
    dense: bool  # whether kernels can read b without a copy

    def weight(self, operands: ScaledOperands) -> tuple[Tensor, Tensor]:
        """Return the weight [N, K] and its factors [N, …]."""
        b, scale_b = operands.b, operands.scale_b
        return (b.t(), _turned(scale_b)) if self.transposed else (b, scale_b)

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems of all families that the call can be taken for."""
        return readings(self.plain, self.scalings_a, self.scalings_b)

    def why_none(self) -> str:
        """Return why there is no such problem."""
        return why_none(self.plain, self.scalings_a, self.scalings_b)

    @property
    def plain(self) -> Problem:
        """The product without its factors."""
        sizes = self.m, self.n, self.k
        return Problem(*sizes, *matrices(*self.dtypes, layout="TN", order=self.order_b), bias=self.bias)


def read_product(operands: ScaledOperands) -> ScaledProduct:
    """Return what the operands of a call mean.

    Nothing is read but shapes, strides, dtypes and devices: the GPU is not waited for.

    Raises:
        InputError: they do not belong together; names the operand, what it is and what it may be.
    """
    a, b, scale_a, scale_b, bias, out_dtype, order_b, scale_layout, _ = operands
    _check_tensors(operands)
    packed = 2 if dtype_name("a", a) == "fp4e2m1" else 1
    k = int(a.shape[-1]) * packed if a.dim() else 0  # torch.jit.trace has tensors for sizes
    transposed = is_transposed(a, b)
    n = int(b.shape[1] if transposed else b.shape[0])
    m = int(a.numel()) * packed // k if k else 0
    if not n or not k:
        raise InputError(f"a {tuple(a.shape)} or b {tuple(b.shape)} is empty: there is nothing to multiply")
    if bias is not None and tuple(bias.shape) != (n,):
        raise InputError(f"bias is {tuple(bias.shape)}; it has a value for each of N={n}")
    check_bias(bias)
    dtypes = dtype_name("a", a), dtype_name("b", b), DTYPE_NAMES[out_dtype]
    _check_order(Problem(max(m, 1), n, k, *matrices(*dtypes, layout="TN", order=order_b)))
    if scale_layout:
        registry.get(ScaleLayout, scale_layout)
    found_a = find_scalings(scale_a, m, k, scale_layout)
    turned = _turned(scale_b) if transposed else scale_b
    found_b = find_scalings(turned, n, k, scale_layout)
    for name, scales, found, rows, which in (
        ("scale_a", scale_a, found_a, m, "M"),
        ("scale_b", scale_b, found_b, n, "N"),
    ):
        if not found:
            known = describe_known(rows, k, which, transposed and name == "scale_b", scale_layout)
            raise InputError(
                f"{name} is {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}; it may be {known}"
            )
    weight = b.t() if transposed else b
    return ScaledProduct(
        m, n, k, transposed, dtypes, *agreeing(found_a, found_b), "none" if bias is None else "n", order_b,
        weight.is_contiguous(),
    )  # fmt: skip


def _check_order(problem: Problem) -> None:
    """Refuse a weight that can't have the order that it is said to have."""
    if problem.b.order == PLAIN:
        return
    possible = registry.get(WeightLayout, problem.b.order).supports(problem)
    if not possible:
        raise InputError(f"{possible}; b has N {problem.n} and K {problem.k}")


def _check_tensors(operands: ScaledOperands) -> None:
    """Refuse operands that are no tensors, are on several devices, or have a type that no scaled product has."""
    named = {"a": operands.a, "b": operands.b, "scale_a": operands.scale_a, "scale_b": operands.scale_b}
    named |= {} if operands.bias is None else {"bias": operands.bias}
    check_tensors(named, together=False)
    check_devices(operands)
    if operands.out_dtype not in SCALED_RESULTS:
        raise InputError(
            f"out_dtype is {operands.out_dtype}; scaled products give {', '.join(map(str, SCALED_RESULTS))}"
        )
    for name in "ab":
        dtype = DTYPES[dtype_name(name, named[name])]
        if not dtype.is_fp8 and dtype.name not in ("int8", "fp4e2m1"):
            raise InputError(f"{name} is {named[name].dtype}; scaled products take fp8, int8 or fp4")
    names = dtype_name("a", operands.a), dtype_name("b", operands.b)
    for name, alone in (("int8", "int8"), ("fp4e2m1", "fp4")):
        if names.count(name) == 1:
            raise InputError(f"a is {operands.a.dtype}, b is {operands.b.dtype}: {alone} is multiplied by {alone}")


def check_devices(operands: ScaledOperands) -> None:
    """Refuse operands that are not on one device.

    Raises:
        InputError: names the operand and both devices.
    """
    for name in ("b", "scale_a", "scale_b", "bias"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.device != operands.a.device:
            raise InputError(f"{name} is on {tensor.device}, a on {operands.a.device}")


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return our name of a tensor's type; bytes are fp4, two numbers each.

    Raises:
        InputError: no type of scaled products; `name` is what the message calls the tensor.
    """
    if tensor.dtype == _PACKED_FP4:
        return "fp4e2m1"
    if tensor.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} is {tensor.dtype}; scaled products take fp8, int8 or fp4")
    return DTYPE_NAMES[tensor.dtype]


def is_transposed(a: Tensor, b: Tensor) -> bool:
    """Return whether b is a column-major view [K, N] of the weight [N, K].

    Raises:
        InputError: it is neither that nor the weight.
    """
    k = a.shape[-1] if a.dim() else 0
    if b.dim() == 2:
        if b.shape[1] == k and (b.stride(1) == 1 or k == 1):
            return False
        if b.shape[0] == k and (b.stride(0) == 1 or k == 1):
            return True
    raise InputError(
        f"b is {tuple(b.shape)} with strides {b.stride()}; for a {tuple(a.shape)} it is a linear layer's weight "
        f"[N, {k}], row-major, or its transposed view [{k}, N]"
    )


def _turned(scales: Tensor) -> Tensor:
    return scales.t() if scales.dim() == 2 else scales

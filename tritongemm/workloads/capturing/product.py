"""The noun `Product`: one product of matrices as a program asked for it; and those of PyTorch's own operations."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError
from tritongemm.core.problem import PLAIN, Operand, matrices
from tritongemm.core.support import Support
from tritongemm.operations.contract import ProductOperation, bind
from tritongemm.operations.grouped import GROUPED
from tritongemm.operations.grouped_operands import GroupedOperands
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands

_NAMES = {getattr(torch, d.torch): d.name for d in DTYPES.values() if hasattr(torch, d.torch)}
_TUNABLE = frozenset(name for name, d in DTYPES.items() if d.packed == 1 and name not in ("int32", "e8m0"))


@dataclass(frozen=True)
class Product:
    """One product C[M, N] = A[M, K] @ B[K, N], or why there is none that can be tuned."""

    operation: str  # the function that was called, such as `linear`
    # m, n, k: sizes
    m: int
    n: int
    k: int
    # a, b, c: operands without scale factors, whose dtypes are PyTorch's own where `core.dtypes` has none
    a: Operand
    b: Operand
    c: Operand
    bias: str = "none"  # `n` for one value per column of C, or `none`
    batch: int = 1  # number of independent products
    groups: int = 1  # products of different M that share the call; M is that of all
    family: str = "dense"  # what is computed, a name of numerics/families
    scales: str = ""  # granularity of the scale factors, where it is not the family's usual one
    left_out: str = ""  # why it can't be tuned; "" where it can
    one_scale: bool = False  # whether A and B have one scale factor each, as AITER's `scaleAB` says
    epilogue: str = "none"  # what is done with the product, as in `core.problem.Problem`
    room: int = 0  # rows that each group has room for, all of which M counts; 0 where groups have no room of their own

    @property
    def shared(self) -> str:
        """The operand that all products of a batch share, ``a`` or ``b``; "" where each has its own."""
        return "a" if self.a.shared else "b" if self.b.shared else ""

    @property
    def is_layer(self) -> bool:
        """Whether it has the layouts of a linear layer."""
        turned = self.a.row_major and not self.b.row_major and self.b.order == PLAIN and self.epilogue == "none"
        return turned and self.batch == self.groups == 1


def of_layer(operation: str, x: Tensor, w: Tensor, bias: Tensor | None, result: Tensor) -> Product | None:
    """Return the product of a linear layer, x [..., K] and w [N, K]; None where an operand is empty.

    Under autocast the dtype of the result [..., N] is also that of the operands.
    """
    if x.dim() == 0 or w.dim() != 2:
        return of_nothing(operation, f"a layer of {x.dim()} and {w.dim()} dimensions")
    k = x.shape[-1]
    if not x.numel() or not w.numel():
        return None
    cast = torch.is_autocast_enabled(x.device.type)
    a, b = (result.dtype, result.dtype) if cast else (x.dtype, w.dtype)
    rows = x.reshape(-1, k) if x.dim() > 2 and x.is_contiguous() else x
    is_row_major = w.shape[1] > 1 and w.stride(1) != 1 and w.stride(0) == 1
    operands = Operand(_name(a), x.dim() == 1 or _is_row_major(rows)), Operand(_name(b), is_row_major)
    sizes = x.numel() // k, w.shape[0], k
    return _checked(
        Product(operation, *sizes, *operands, Operand(_name(result.dtype)), "none" if bias is None else "n")
    )


def of_aten(operation: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of one of PyTorch's basic operations; None where an operand is empty."""
    same = operation in (name, name.replace("::", "."))
    return BASIC[name](operation if same else f"{operation} by {name}", args, kwargs)


def of_own(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Product]:
    """Return the products of one of our own calls, by its arguments."""
    operation, given = bind(call.partition(".")[2], args, kwargs)
    if any(isinstance(one, Tensor) and not one.numel() for one in given):
        return []
    cast = operation.is_cast(given)
    given = type(given)(*(without_memory(one, cast) if isinstance(one, Tensor) else one for one in given))
    return [of_reading(call, *product) for product in operation.products(given)]


def without_memory(t: Tensor, cast: bool = True) -> Tensor:
    """Return a tensor of the same shape and strides, and of the dtype that autocast gives it, if it is cast."""
    device = t.device.type
    cast = cast and t.is_floating_point() and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if cast else t.dtype
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="meta")


def of_reading(call: str, operation: ProductOperation, checked: Any) -> Product:
    """Return the product that checked operands are read as, or why there is none that can be tuned."""
    reading = operation.read(checked)
    if isinstance(reading, Support):
        return of_nothing(call, reading.reason)
    p = reading.problems[0] if reading.problems else reading.plain
    assert p is not None
    factors = [reading.tensors[name] for name in ("scale_a", "scale_b") if name in reading.tensors]
    one_scale = bool(factors) and all(one.numel() == 1 for one in factors)
    return Product(
        call, p.m, p.n, p.k, p.a._replace(scaling=None), p.b._replace(scaling=None), p.c, p.bias, p.batch,
        p.group_count, p.family, p.scales, reading.why_none, one_scale, p.epilogue, p.groups.room if p.groups else 0,
    )  # fmt: skip


def of_nothing(operation: str, reason: str) -> Product:
    """Return a call of which only is known that it can't be tuned, and why."""
    return Product(operation, 0, 0, 0, *matrices(""), left_out=reason)


def _of_two(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `mm`, `bmm` and `_int_mm`: A @ B."""
    wide = torch.int32 if operation.endswith("_int_mm") else None
    return of_matrices(operation, args[0], args[1], kwargs.get("out_dtype") or (args[2] if len(args) > 2 else wide))


def _of_sum(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `addmm` and `baddbmm`: beta * a summand + alpha * A @ B."""
    summand, a, b = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    is_one_row = summand.dim() < 2 or summand.shape[-2] == 1 or summand.stride(-2) == 0
    if beta == 1 and alpha == 1 and summand.shape[-1:] == b.shape[-1:] and is_one_row:
        return of_matrices(operation, a, b, bias="n")
    what = "a matrix" if beta else ""
    factors = "" if beta in (0, 1) and alpha == 1 else "factors"
    added = " and ".join(filter(None, (what, factors)))
    return of_matrices(f"{operation} with {added}" if added else operation, a, b)


def _of_vector(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `mv` and `dot`, which have no matrix on one side."""
    return of_nothing(operation, f"a product with a vector of {args[-1].shape[0]}")


def _of_scaled(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `_scaled_mm`: A @ B with scale factors."""
    names = ("scale_a", "scale_b", "bias", "scale_result", "out_dtype")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    return _of_factors(operation, args[0], args[1], given["scale_a"], given["scale_b"], given)


def _of_recipe(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `_scaled_mm_v2`: A @ B with scale factors that a recipe describes."""
    names = ("scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias", "out_dtype")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    scale_a, scale_b = given["scale_a"], given["scale_b"]
    if len(scale_a) == len(scale_b) == 1 and not any((*given["swizzle_a"], *given["swizzle_b"])):
        return _of_factors(operation, args[0], args[1], scale_a[0], scale_b[0], given)
    reason = "scale factors of two levels, or in an order of their own"
    product = of_matrices(operation, args[0], args[1], has_factors=True)
    return product and replace(product, left_out=reason)


def _of_factors(
    operation: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, given: dict[str, Any]
) -> Product | None:
    bias, out = given.get("bias"), given.get("out_dtype") or a.dtype
    try:
        return of_reading(operation, SCALED, SCALED.check(ScaledOperands(a, b, scale_a, scale_b, bias, out)))
    except InputError as error:
        product = of_matrices(operation, a, b, out, "none" if bias is None else "n", has_factors=True)
        return product and replace(product, left_out=str(error))


def _of_groups(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `_grouped_mm`: the rows of A [M, K] in groups, each with its own B [groups, K, N]."""
    given = {**dict(zip(("offs", "bias", "out_dtype"), args[2:], strict=False)), **kwargs}
    return _grouped(operation, args[0], args[1], given)


def _of_scaled_groups(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the product of `_scaled_grouped_mm`, with a factor for each row of A and each column of each B."""
    names = ("scale_a", "scale_b", "offs", "bias", "scale_result", "out_dtype")
    return _grouped(operation, args[0], args[1], {**dict(zip(names, args[2:], strict=False)), **kwargs})


def _grouped(operation: str, a: Tensor, b: Tensor, given: dict[str, Any]) -> Product | None:
    ends, scales = given.get("offs"), (given.get("scale_a"), given.get("scale_b"))
    if a.dim() != 2 or b.dim() != 3 or ends is None or given.get("bias") is not None:
        return _grouped_left_out(operation, a, b)
    operands = GroupedOperands(a, b, ends, *scales, given.get("out_dtype"))
    try:
        return of_reading(operation, GROUPED, GROUPED.check(operands))
    except InputError:
        return _grouped_left_out(operation, a, b)


def _grouped_left_out(operation: str, a: Tensor, b: Tensor) -> Product:
    return of_nothing(operation, f"grouped products of {tuple(a.shape)} and {tuple(b.shape)} {_name(a.dtype)}")


BASIC: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Product | None]] = {
    "mm": _of_two,
    "bmm": _of_two,
    "_int_mm": _of_two,
    "addmm": _of_sum,
    "baddbmm": _of_sum,
    "_scaled_mm": _of_scaled,
    "_scaled_mm_v2": _of_recipe,
    "mv": _of_vector,
    "dot": _of_vector,
    "vdot": _of_vector,
    "_grouped_mm": _of_groups,
    "_scaled_grouped_mm": _of_scaled_groups,
    "_scaled_grouped_mm_v2": lambda operation, args, kwargs: _grouped_left_out(operation, *args[:2]),
}


def of_matrices(
    operation: str, a: Tensor, b: Tensor, out: torch.dtype | None = None, bias: str = "none", has_factors: bool = False
) -> Product | None:
    """Return the product A [..., M, K] @ B [..., K, N]; None where one is empty. With factors, bytes hold two fp4."""
    if not a.numel() or not b.numel():
        return None
    *batch, m, k = a.shape
    of_a, of_b = ("fp4e2m1" if has_factors and t.dtype == torch.uint8 else _name(t.dtype) for t in (a, b))
    products = math.prod(batch)
    of_one = [products > 1 and t.stride(0) == 0 for t in (a, b)]
    one = sum(of_one) == 1
    left = Operand(of_a, _is_row_major(a), shared=one and of_one[0])
    right = Operand(of_b, _is_row_major(b), shared=one and of_one[1])
    if has_factors and of_a in DTYPES:
        k *= DTYPES[of_a].packed
    product = Product(operation, m, b.shape[-1], k, left, right, Operand(_name(out or a.dtype)), bias, products)
    return _checked(product, {*_TUNABLE, "fp4e2m1"} if has_factors else _TUNABLE)


def _is_row_major(t: Tensor) -> bool:
    """Return whether the elements of a row are adjacent; PyTorch copies other operands into rows."""
    columns = t.stride(-2) == 1 and t.shape[-2] > 1
    return t.stride(-1) == 1 or not columns


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _checked(product: Product, tunable: Set[str] = _TUNABLE) -> Product:
    """Return the product, with the reason why it can't be tuned."""
    unknown = [one.dtype for one in (product.a, product.b) if one.dtype not in tunable]
    unknown += [product.c.dtype] if product.c.dtype not in DTYPES else []
    if not unknown:
        return product
    return replace(product, left_out=f"there are no kernels for {unknown[0]}")

"""The noun `Product`: one product of matrices as a program asked for it; and those of PyTorch's own operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.workloads.capturing.factors import find_family

_NAMES = {getattr(torch, d.torch): d.name for d in DTYPES.values() if hasattr(torch, d.torch)}
_FP4 = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))
_POWERS = {"": "mx", "e8m0_32x8": "mx_shuffled"}  # granularities by how powers of two along K lie
_TUNABLE = frozenset(name for name, d in DTYPES.items() if d.packed == 1 and name not in ("int32", "e8m0"))


@dataclass(frozen=True)
class Product:
    """One product C[M, N] = A[M, K] @ B[K, N], or why there is none that can be tuned.

    Attributes:
        operation: the function that was called, such as ``linear``.
        m, n, k: sizes.
        dtype_a, dtype_b, dtype_c: names of `core.dtypes`, or PyTorch's own where that has none.
        row_major_a, row_major_b: layouts, as in `core.problem.Problem`.
        bias: ``n`` for one value per column of C, or ``none``.
        batch: number of independent products.
        shared: the operand that all products of a batch share, ``a`` or ``b``, or "".
        family: what is computed, a name of numerics/families.
        scales: granularity of the scale factors, where it is not the family's usual one.
        groups: products of different M that share the call; M is that of all.
        left_out: why it can't be tuned; "" where it can.
        one_scale: whether A and B have one scale factor each, as AITER's ``scaleAB`` says.
        order_b: order of a weight in memory, where it is not plain.
    """

    operation: str
    m: int
    n: int
    k: int
    dtype_a: str
    dtype_b: str
    dtype_c: str
    row_major_a: bool = True
    row_major_b: bool = True
    bias: str = "none"
    batch: int = 1
    family: str = "dense"
    left_out: str = ""
    one_scale: bool = False
    shared: str = ""
    scales: str = ""
    groups: int = 1
    order_b: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether it has the layouts of a linear layer."""
        lies_plainly = self.row_major_a and not self.row_major_b and not self.order_b
        return lies_plainly and self.batch == self.groups == 1


def of_layer(operation: str, x: Tensor, w: Tensor, bias: Tensor | None, result: Tensor) -> Product | None:
    """The product of a linear layer; None where an operand is empty.

    Args:
        operation: the function that was called.
        x: [..., K].
        w: [N, K], the weight.
        bias: [N] or None.
        result: [..., N]; under autocast its dtype is also that of the operands.
    """
    if x.dim() == 0 or w.dim() != 2:
        return of_nothing(operation, f"a layer of {x.dim()} and {w.dim()} dimensions")
    k = x.shape[-1]
    if not x.numel() or not w.numel():
        return None
    cast = torch.is_autocast_enabled(x.device.type)
    a, b = (result.dtype, result.dtype) if cast else (x.dtype, w.dtype)
    rows = x.reshape(-1, k) if x.dim() > 2 and x.is_contiguous() else x
    return _judged(
        Product(
            operation,
            x.numel() // k,
            w.shape[0],
            k,
            _name(a),
            _name(b),
            _name(result.dtype),
            row_major_a=x.dim() == 1 or _is_row_major(rows),
            row_major_b=w.shape[1] > 1 and w.stride(1) != 1 and w.stride(0) == 1,
            bias="none" if bias is None else "n",
        )
    )


def of_aten(operation: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The product of one of PyTorch's basic operations; None where an operand is empty.

    Args:
        operation: the function that the program called.
        name: the basic operation, a key of `BASIC`.
        args: its arguments.
        kwargs: those that were given by name.
    """
    same = operation in (name, name.replace("::", "."))
    return BASIC[name](operation if same else f"{operation} by {name}", args, kwargs)


def of_powers(operation: str, m: int, weight: Tensor, out: torch.dtype, layout: str, **others: Any) -> Product:
    """The product of M rows with a weight [N, K], both with a power of two (e8m0) for each 32 numbers along K.

    Args:
        operation: the function that was called.
        m: rows.
        weight: of fp8; of fp4 two numbers a byte.
        out: dtype of the result.
        layout: "" where powers lie in rows, or the name of their order.
        others: further attributes.
    """
    if layout not in _POWERS:
        return of_nothing(operation, f"powers of two in the order {layout}")
    (n, k), is_fp4 = weight.shape, weight.dtype in _FP4
    name = "fp4e2m1" if is_fp4 else _name(weight.dtype)
    family = "a4w4_blockscale" if is_fp4 else "a8w8_blockscale"
    scales = "" if is_fp4 and layout else _POWERS[layout]  # of fp4 shuffled ones are the usual ones
    sizes = m, n, 2 * k if is_fp4 else k
    return Product(operation, *sizes, name, name, _name(out), row_major_b=False, family=family, scales=scales, **others)


def of_nothing(operation: str, reason: str) -> Product:
    """A call of which only is known that it can't be tuned, and why."""
    return Product(operation, 0, 0, 0, "", "", "", left_out=reason)


def _of_two(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`mm`, `bmm` and `_int_mm`: A @ B."""
    wide = torch.int32 if operation.endswith("_int_mm") else None
    return _of(operation, args[0], args[1], kwargs.get("out_dtype") or (args[2] if len(args) > 2 else wide))


def _of_sum(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`addmm` and `baddbmm`: beta * a summand + alpha * A @ B."""
    summand, a, b = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    is_bias = summand.shape[-1:] == b.shape[-1:] and _is_one_row(summand)
    if beta == 1 and alpha == 1 and is_bias:
        return _of(operation, a, b, bias="n")
    what = "a matrix" if beta else ""
    factors = "" if beta in (0, 1) and alpha == 1 else "factors"
    added = " and ".join(filter(None, (what, factors)))
    return _of(f"{operation} with {added}" if added else operation, a, b)


def _is_one_row(summand: Tensor) -> bool:
    return bool(summand.dim() == 1 or summand.shape[-2] == 1 or summand.stride(-2) == 0)


def _of_scaled(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`_scaled_mm`: A @ B with scale factors."""
    names = ("scale_a", "scale_b", "bias", "scale_result", "out_dtype")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    return with_factors(operation, args[0], args[1], given["scale_a"], given["scale_b"], given)


def with_factors(
    operation: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, given: dict[str, Any]
) -> Product | None:
    """A [M, K] @ B [K, N] with factors of A and, transposed as B is, of the weight."""
    bias = "none" if given.get("bias") is None else "n"
    of_weight = scale_b.t() if scale_b.dim() == 2 else scale_b
    family, scales, reason = find_family(scale_a, of_weight, (a.shape[0], b.shape[1], a.shape[1]))
    product = _of(operation, a, b, given.get("out_dtype"), bias, family, reason)
    one = scale_a.numel() == 1 and scale_b.numel() == 1
    return product and replace(product, one_scale=one, scales=scales)


def _of_own_layer(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`tritongemm.mm`: a linear layer."""
    given: dict[str, Any] = dict.fromkeys(("x", "w", "bias", "out_dtype"))
    given |= dict(zip(given, args, strict=False)) | kwargs
    x, w = given["x"], given["w"]
    bias = "none" if given["bias"] is None else "n"
    return _of(operation, x.reshape(-1, x.shape[-1]), w.t(), given["out_dtype"] or _usual(x), bias)


def _usual(a: Tensor) -> torch.dtype:
    """The type of the result of our own products of A without scale factors, where none is asked for."""
    if a.dtype.itemsize > 1:
        return a.dtype
    return torch.float16 if a.is_floating_point() else torch.int32


def _of_batch(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`tritongemm.bmm` and `scaled_bmm`: A @ B for each product, with scale factors or without."""
    names = ("a", "b", "bias", "out_dtype", "scale_a", "scale_b", "scale_layout")
    given: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    a, b = given["a"], given["b"]
    bias = "none" if given["bias"] is None else "n"
    family, scales, reason = "dense", "", ""
    if given["scale_a"] is not None and a.numel() and b.numel() and given["scale_b"].element_size() == 1:
        weight, out, layout = b[0].t(), given["out_dtype"] or _usual(a), given["scale_layout"] or ""
        return of_powers(operation, a.shape[1], weight, out, layout, batch=a.shape[0], bias=bias)
    if given["scale_a"] is not None:
        of_a, of_b = (
            scale.select(0, 0) if scale.dim() > 1 else scale for scale in (given["scale_a"], given["scale_b"])
        )
        of_weight = of_b.t() if of_b.dim() == 2 else of_b
        family, scales, reason = find_family(of_a, of_weight, (a.shape[1], b.shape[2], a.shape[2]))
    product = _of(operation, a, b, given["out_dtype"] or _usual(a), bias, family, reason)
    return product and replace(product, scales=scales)


def _of_vector(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`mv` and `dot`: what has no matrix on one side."""
    return of_nothing(operation, f"a product with a vector of {args[-1].shape[0]}")


def _of_recipe(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`_scaled_mm_v2`: A @ B with scale factors that a recipe describes."""
    names = ("scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias", "out_dtype")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    scale_a, scale_b = given["scale_a"], given["scale_b"]
    if len(scale_a) == len(scale_b) == 1 and not any((*given["swizzle_a"], *given["swizzle_b"])):
        return with_factors(operation, args[0], args[1], scale_a[0], scale_b[0], given)
    return _of(operation, args[0], args[1], left_out="scale factors of two levels, or in an order of their own")


def _of_groups(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`_grouped_mm`: the rows of A [M, K] in groups, each with a B of its own of [groups, K, N]."""
    given = {**dict(zip(("offs", "bias", "out_dtype"), args[2:], strict=False)), **kwargs}
    return grouped(operation, args[0], args[1], given)


def _of_scaled_groups(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`_scaled_grouped_mm`: the same with a factor for each row of A and each column of each B."""
    names = ("scale_a", "scale_b", "offs", "bias", "scale_result", "out_dtype")
    given = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    a, b, scale_a, scale_b = args[0], args[1], given["scale_a"], given["scale_b"]
    by_row = a.dim() == 2 and b.dim() == 3 and scale_a.numel() == a.shape[0]
    if not by_row or tuple(scale_b.shape) != (b.shape[0], b.shape[2]):
        return _grouped_left_out(operation, a, b)
    return grouped(operation, a, b, {**given, "out_dtype": given.get("out_dtype") or torch.bfloat16}, "a8w8")


def grouped(operation: str, a: Tensor, b: Tensor, given: dict[str, Any], family: str = "dense") -> Product | None:
    """A product of groups: A [M, K], whose rows ``offs`` of `given` shares out, and B [groups, K, N]."""
    if a.dim() != 2 or b.dim() != 3 or given.get("offs") is None or given.get("bias") is not None:
        return _grouped_left_out(operation, a, b)
    product = _of(operation, a, b[0], given.get("out_dtype"), family=family)
    return product and replace(product, groups=b.shape[0])


def _grouped_left_out(operation: str, a: Tensor, b: Tensor) -> Product:
    return of_nothing(operation, f"grouped products of {tuple(a.shape)} and {tuple(b.shape)} {_name(a.dtype)}")


def _of_group_recipe(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """`_scaled_grouped_mm_v2`: the same with scale factors that a recipe describes."""
    return _grouped_left_out(operation, args[0], args[1])


BASIC: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Product | None]] = {
    "mm": _of_two,
    "bmm": _of_two,
    "_int_mm": _of_two,
    "addmm": _of_sum,
    "baddbmm": _of_sum,
    "tritongemm::mm": _of_own_layer,
    "tritongemm::bmm": _of_batch,
    "_scaled_mm": _of_scaled,
    "_scaled_mm_v2": _of_recipe,
    "mv": _of_vector,
    "dot": _of_vector,
    "vdot": _of_vector,
    "_grouped_mm": _of_groups,
    "_scaled_grouped_mm": _of_scaled_groups,
    "_scaled_grouped_mm_v2": _of_group_recipe,
}


def _of(
    operation: str,
    a: Tensor,
    b: Tensor,
    out: torch.dtype | None = None,
    bias: str = "none",
    family: str = "dense",
    left_out: str = "",
) -> Product | None:
    if not a.numel() or not b.numel():
        return None
    *batch, m, k = a.shape
    dtypes = _name(a.dtype), _name(b.dtype), _name(out or a.dtype)
    layouts, products = (_is_row_major(a), _is_row_major(b)), math.prod(batch)
    shared = [name for name, t in (("a", a), ("b", b)) if products > 1 and t.stride(0) == 0]
    one = shared[0] if len(shared) == 1 else ""
    return _judged(
        Product(operation, m, b.shape[-1], k, *dtypes, *layouts, bias, products, family, left_out, shared=one)
    )


def _is_row_major(t: Tensor) -> bool:
    """Whether the elements of a row lie side by side; what lies otherwise is copied into rows by PyTorch."""
    columns = t.stride(-2) == 1 and t.shape[-2] > 1
    return t.stride(-1) == 1 or not columns


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _judged(product: Product) -> Product:
    """The product, with the reason why it can't be tuned."""
    unknown = [d for d in (product.dtype_a, product.dtype_b) if d not in _TUNABLE]
    unknown += [d for d in (product.dtype_c,) if d not in DTYPES]
    if not unknown or product.left_out:
        return product
    return replace(product, left_out=f"there are no kernels for {unknown[0]}")

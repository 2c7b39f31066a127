"""The products of our own calls with scales and of groups, by their arguments: they are not run again to be watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.workloads.capturing.product import Product, grouped, of_powers, with_factors

_PLAIN = "plain"  # order of a weight


def _of_scaled(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Product | None]:
    """`tritongemm.scaled_mm`: x [..., K] and a weight [N, K], or its transposed view."""
    names = ("a", "b", "scale_a", "scale_b", "bias", "out_dtype", "order_b", "scale_layout")
    given = {"out_dtype": torch.bfloat16, **dict(zip(names, args, strict=False)), **kwargs}
    a, w = given["a"], given["b"]
    if not a.numel() or not w.numel():
        return []
    is_weight = w.shape[1] == a.shape[-1] and w.stride(1) == 1
    scale_a, scale_b = given["scale_a"], given["scale_b"]
    order = given.get("order_b", _PLAIN)
    order = "" if order == _PLAIN else order
    if scale_b.element_size() == 1:
        m, bias = a.numel() // a.shape[-1], "none" if given.get("bias") is None else "n"
        weight, layout = w if is_weight else w.t(), given.get("scale_layout", "")
        return [of_powers(operation, m, weight, given["out_dtype"], layout, bias=bias, order_b=order)]
    factors = scale_a.reshape(-1, scale_a.shape[-1]) if scale_a.dim() > 2 else scale_a
    if is_weight:
        w, scale_b = w.t(), scale_b.t() if scale_b.dim() == 2 else scale_b
    found = with_factors(operation, a.reshape(-1, a.shape[-1]), w, factors, scale_b, given)
    return [found and replace(found, order_b=order)]


def _of_layer(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Product | None]:
    """`tritongemm.linear_fp8`: x [..., K], which it quantises as the weight's factors want it."""
    given = {
        "bias": None,
        "out_dtype": None,
        **_named(("x", "weight", "weight_scale", "bias", "out_dtype"), args, kwargs),
    }
    x, w, scale = given["x"], given["weight"], given["weight_scale"]
    if not x.numel() or not w.numel():
        return []
    k = x.shape[-1]
    m, n = x.numel() // k, w.shape[0]
    if scale.element_size() == 1:
        bias = "none" if given["bias"] is None else "n"
        return [of_powers(operation, m, w, given["out_dtype"] or x.dtype, "", bias=bias)]
    along_k = scale.dim() == 2 and (scale.shape[1] > 1 or scale.shape[0] not in (1, n))
    q = torch.empty((m, k), dtype=w.dtype, device="meta")
    factors = torch.empty((cdiv(k, SCALED_BLOCK), m) if along_k else (m, 1), device="meta")
    if scale.numel() == 1:  # Kernels read a factor for each row.
        scale = torch.empty(n, device="meta")
    of_w = scale.t() if scale.dim() == 2 else scale
    out = given["out_dtype"] or x.dtype
    said = {"bias": given["bias"], "out_dtype": out}
    return [with_factors(operation, q, w.t(), factors.t() if along_k else factors, of_w, said)]


def _of_groups(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Product | None]:
    """`tritongemm.grouped_mm`: the rows of A in groups, each with a B of its own of [groups, K, N]."""
    given = {
        "scale_b": None,
        "out_dtype": None,
        "scale_layout": "",
        **_named(("a", "b", "offs", "scale_a", "scale_b", "out_dtype", "scale_layout"), args, kwargs),
    }
    return [_grouped(operation, given["a"], given["b"], given["scale_b"], given["out_dtype"], given["scale_layout"])]


def _of_mixture(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Product | None]:
    """`tritongemm.fused_moe`: gate and up of each expert, then down, over the rows of all tokens."""
    names = ("x", "w1", "w2", "topk_weights", "topk_ids", "activation", "w1_scale", "w2_scale", "scale_layout")
    given = {"w1_scale": None, "w2_scale": None, "scale_layout": "", **_named(names, args, kwargs)}
    rows, x = given["topk_ids"].numel(), given["x"]
    products: list[Product | None] = []
    for w, scale in ((given["w1"], given["w1_scale"]), (given["w2"], given["w2_scale"])):
        a = torch.empty((rows, w.shape[2]), dtype=w.dtype, device="meta")
        products.append(_grouped(operation, a, w.mT, scale, x.dtype, given["scale_layout"]))
    return products


def _grouped(
    operation: str, a: Tensor, b: Tensor, scale_b: Tensor | None, out: torch.dtype | None, layout: str
) -> Product | None:
    if scale_b is None:
        return grouped(operation, a, b, {"offs": True, "out_dtype": out})
    if scale_b.element_size() == 1 and a.dim() == 2 and a.numel():
        return of_powers(operation, a.shape[0], b[0].t(), out or torch.bfloat16, layout, groups=b.shape[0])
    family = "a8w8" if scale_b.dim() == 2 else "a8w8_blockscale"
    return grouped(operation, a, b, {"offs": True, "out_dtype": out or torch.bfloat16}, family)


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


OWN: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Sequence[Product | None]]] = {
    "tritongemm.scaled_mm": _of_scaled,
    "tritongemm.linear_fp8": _of_layer,
    "tritongemm.grouped_mm": _of_groups,
    "tritongemm.fused_moe": _of_mixture,
}

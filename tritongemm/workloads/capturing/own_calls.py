"""The products of our own calls with scales and of groups, by their arguments: they are not run again to be watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritongemm.operations.factors import of_groups, of_layer
from tritongemm.workloads.capturing.product import Product, grouped, of_matrices, of_scaled, with_factors


def _of_scaled(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Product | None]:
    """`tritongemm.scaled_mm`: x [..., K] and a weight [N, K], or its transposed view."""
    names = ("a", "b", "scale_a", "scale_b", "bias", "out_dtype", "order_b", "scale_layout")
    given = {"out_dtype": torch.bfloat16, **dict(zip(names, args, strict=False)), **kwargs}
    a, w = given["a"], given["b"]
    if not a.numel() or not w.numel():
        return []
    scale_b = given["scale_b"]
    if w.shape[1] == a.shape[-1] and (w.stride(1) == 1 or w.shape[1] == 1):  # the weight
        w, scale_b = w.t(), scale_b.t() if scale_b.dim() == 2 else scale_b
    product = of_scaled(operation, a.reshape(-1, a.shape[-1]), w, given["scale_a"], scale_b, given)
    return [product and replace(product, row_major_b=False)]


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
    k, bias = x.shape[-1], "none" if given["bias"] is None else "n"
    q = torch.empty((x.numel() // k, w.shape[1]), dtype=w.dtype, device="meta")
    product = of_matrices(operation, q, w.t(), given["out_dtype"] or x.dtype, bias, has_factors=True)
    return [with_factors(product, *of_layer(scale, (x.numel() // k, w.shape[0], k)))]


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
    usual = None if scale_b is None else torch.bfloat16
    return grouped(operation, a, b, {"offs": True, "out_dtype": out or usual}, of_groups(scale_b, layout))


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


OWN: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Sequence[Product | None]]] = {
    "tritongemm.scaled_mm": _of_scaled,
    "tritongemm.linear_fp8": _of_layer,
    "tritongemm.grouped_mm": _of_groups,
    "tritongemm.fused_moe": _of_mixture,
}

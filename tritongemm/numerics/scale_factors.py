"""Converts fp4 and e8m0 numbers and scale factors that change along K, as stored or spread over their operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritongemm.core.dtypes import E8M0_BIAS, E8M0_NAN, INT4_ZERO
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import Scaling
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout

if TYPE_CHECKING:
    from torch import Tensor, dtype


def exponents_as_numbers(factors: Tensor) -> Tensor:
    """Powers of two in float64 of e8m0 bytes; NaN where they say so."""
    import torch

    exponents = factors.contiguous().view(torch.uint8).double()
    return torch.where(exponents == E8M0_NAN, torch.nan, (exponents - E8M0_BIAS).exp2())


def four_bits_as_numbers(packed: Tensor, name: str) -> Tensor:
    """Return the numbers [..., K] in float64 of bytes [..., K / 2] of a type of four bits, by our name."""
    import torch

    if name == "fp4e2m1":
        return fp4_as_numbers(packed, torch.float32).double()
    return (torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8) - INT4_ZERO).double()


def fp4_as_numbers(packed: Tensor, dtype: dtype) -> Tensor:
    """Return the numbers [..., K] of fp4 bytes [..., K / 2], in a wider type."""
    import torch

    return fp4_of_bits(torch.stack((packed & 15, packed >> 4), -1).flatten(-2), dtype)


def fp4_of_bits(bits: Tensor, dtype: dtype) -> Tensor:
    """Return the fp4 numbers of bits from 0 to 15, computed where they are: a graph of CUDA copies no table."""
    import torch

    exponent, fraction = (bits >> 1 & 3).to(dtype), (bits & 1).to(dtype)
    magnitude = torch.where(exponent > 0, (2 + fraction) * (exponent - 2).exp2(), fraction / 2)
    return torch.where(bits > 7, -magnitude, magnitude)


def scale_places(layout: str) -> tuple[str, str]:
    """Return what a factor's row and its group along K add to its index in memory, as kernels write them.

    The layout ``groups``, which no such kernel writes, has "" for both.
    """
    if layout in ("rows", "groups"):
        return ("r * groups", "g") if layout == "rows" else ("", "")
    order = registry.get(ScaleLayout, layout)
    return order.row_place, order.group_place


def block_order(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `block` and `axes` of a layout of factors, both empty where kernels load factors one by one."""
    if layout in ("rows", "groups"):
        return (), ()
    order = registry.get(ScaleLayout, layout)
    return order.block, order.axes


def in_rows(scaling: Scaling, factors: Tensor) -> Tensor:
    """Return factors that change along K as [..., rows, groups along K], still padded.

    Those of a batch or of groups have a dimension for it in front. Zero points are left out.
    """
    import torch

    if scaling.zeros:
        factors = factors[..., 0, :]
    if scaling.layout == "rows":
        return factors
    if scaling.layout == "groups":
        return factors.mT
    order = registry.get(ScaleLayout, scaling.layout)
    if factors.dim() == 2:
        return order.unpack(factors)
    return torch.stack([in_rows(scaling, each) for each in factors])


def spread(scaling: Scaling, factors: Tensor, rows: int, k: int, type_: dtype | None = None) -> Tensor:
    """Return the factors as [..., rows, K], one for each element of A, or of B by its columns.

    Those of a batch have a dimension for it in front. They are in float64 where no type is named.
    """
    import torch

    factors = in_rows(scaling, factors)
    factors = (exponents_as_numbers(factors) if scaling.dtype == "e8m0" else factors).to(type_ or torch.float64)
    if scaling.rows:
        across = factors.repeat_interleave(scaling.rows, -2)[..., :rows, :]
    else:
        across = factors[..., :1, :].expand(*factors.shape[:-2], rows, -1)
    if scaling.depth:
        return across.repeat_interleave(scaling.depth, -1)[..., :k]
    return across[..., :1].expand(*across.shape[:-1], k)


def multiplied(problem: Problem, operands: Operands) -> Operands:
    """Return operands whose A [..., M, K] and B [..., K, N] are in float64, multiplied by the factors along K."""
    a, b = operands["a"].double(), operands["b"].double()
    if problem.a.scaling is not None and problem.a.scaling.depth:
        a = a * spread(problem.a.scaling, operands["scale_a"], problem.m, problem.k)
    if problem.b.scaling is not None and problem.b.scaling.depth:
        scaling, of_b = problem.b.scaling, operands["scale_b"]
        if scaling.zeros:
            b = b - of_b[..., 1, :].double().repeat_interleave(scaling.depth, -2)
        b = b * spread(scaling, of_b, problem.n, problem.k).mT
    return operands | {"a": a, "b": b}

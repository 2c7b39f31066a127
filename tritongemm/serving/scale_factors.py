"""Tensors of scale factors: which granularity one has, by its shape and strides, and its factors spread over K."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import Scaling
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import ScaleLayout

GROUP = 128  # elements along K, and rows of a weight, that share a float32 factor
MX_GROUP = 32  # elements along K that share a power of two
EXPONENTS = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
NO_NUMBER = 255  # the exponent that is NaN
_EXPONENT_BIAS = 127
_BY_STRIDES = ("rows", "groups")  # layouts that strides tell; the others are permutations within dense memory

# What a tensor's shape and strides can say, the simplest first. Where several hold, as of one row, they mean the same.
KNOWN = (
    Scaling(rows=0),
    Scaling(),
    *(
        Scaling(rows=rows, depth=GROUP, layout=layout, pad=pad)
        for rows in (1, GROUP)
        for layout, pad in (("rows", (1, 1)), ("groups", (1, 1)), ("groups", (4, 1)))
    ),
    *(Scaling("e8m0", 1, MX_GROUP, layout) for layout in _BY_STRIDES),
)


def find_scalings(scales: Tensor, rows: int, k: int, layout: str, others: Sequence[Scaling] = ()) -> list[Scaling]:
    """The ways in which a tensor can hold the factors of an operand, the simplest first.

    Args:
        scales: the factors: one, one for each row, or [rows, groups along K] in blocks, row-major or with rows the
            fastest.
        rows: rows of the operand, of a weight [N, K] those too.
        k: its elements along K.
        layout: "" for what the strides tell, or the name of a plug-in of numerics/scale_layouts.
        others: further ways to try.
    """
    ways = dict.fromkeys((*KNOWN, *others))
    return [way for way in ways if _is_asked_for(way, layout) and lies_so(scales, way, rows, k)]


def agreeing(of_a: Sequence[Scaling], of_b: Sequence[Scaling]) -> tuple[tuple[Scaling, ...], tuple[Scaling, ...]]:
    """Ways to read the factors of A and of B without those that no way of the other goes with.

    Of a weight [16, 2048], 16 factors in one row are for its rows, or for groups along K: those of A tell.
    """
    along_a, along_b = ({way.depth > 0 for way in ways} for ways in (of_a, of_b))
    both = along_a & along_b
    if not both:
        return tuple(of_a), tuple(of_b)
    return tuple(way for way in of_a if (way.depth > 0) in both), tuple(way for way in of_b if (way.depth > 0) in both)


def _is_asked_for(scaling: Scaling, layout: str) -> bool:
    return scaling.layout == layout if layout else scaling.layout in _BY_STRIDES


def lies_so(scales: Tensor, scaling: Scaling, rows: int, k: int) -> bool:
    """Whether a tensor's dtype, shape and strides are those of a scaling; arguments as for `find_scalings`."""
    if scales.dtype not in (EXPONENTS if scaling.dtype == "e8m0" else (torch.float32,)):
        return False
    extents = scaling.shape(rows, k)
    if scaling.layout not in _BY_STRIDES:
        return tuple(scales.shape) == extents and scales.is_contiguous()
    if not scaling.depth:
        longest = [size for size in scales.shape if size != 1]
        return scales.numel() == extents[0] and scales.dim() <= 2 and len(longest) <= 1 and scales.is_contiguous()
    across, groups = logical_shape(scaling, rows, k)
    if tuple(scales.shape) != (across, groups):
        return False
    if not scales.numel():
        return True  # the strides of no numbers say nothing
    along_rows, along_k = (1, extents[1]) if scaling.layout == "groups" else (extents[1], 1)
    return (across == 1 or scales.stride(0) == along_rows) and (groups == 1 or scales.stride(1) == along_k)


def logical_shape(scaling: Scaling, rows: int, k: int) -> tuple[int, int]:
    """Factors of an operand across its rows and along K, without what memory is padded by."""
    return cdiv(rows, scaling.rows) if scaling.rows else 1, cdiv(k, scaling.depth) if scaling.depth else 1


def spread(scales: Tensor, scaling: Scaling, rows: int, k: int) -> Tensor:
    """The factors in float32 so that they broadcast over an operand [rows, K]."""
    if scaling.layout not in _BY_STRIDES:
        scales = registry.get(ScaleLayout, scaling.layout).unpack(scales)
    if scaling.dtype == "e8m0":
        exponents = scales.contiguous().view(torch.uint8)
        factors = (exponents.float() - _EXPONENT_BIAS).exp2().masked_fill(exponents == NO_NUMBER, torch.nan)
    else:
        factors = scales
    if not scaling.depth:
        return factors.reshape(-1, 1)
    across, groups = logical_shape(scaling, rows, k)
    factors = factors[:across, :groups].repeat_interleave(scaling.depth, 1)[:, :k]
    return factors.repeat_interleave(scaling.rows, 0)[:rows] if scaling.rows > 1 else factors


def describe_known(rows: int, k: int, name: str, transposed: bool = False, layout: str = "") -> str:
    """The shapes that factors of an operand may have, for messages.

    Args:
        rows: of the operand.
        k: its elements along K.
        name: what its rows are called.
        transposed: whether K comes first in the factors, as it does in the operand.
        layout: "" for those that strides tell, or the name of a plug-in of numerics/scale_layouts.
    """
    if layout:
        powers = Scaling("e8m0", depth=MX_GROUP, layout=layout, pad=registry.get(ScaleLayout, layout).pad)
        extents = powers.shape(rows, k)[:: -1 if transposed else 1]
        return f"{extents} in e8m0 for groups of {MX_GROUP} along K, padded and dense, in the layout {layout}"

    def shape(across: int, group: int) -> str:
        extents = (across, cdiv(k, group))
        return str(extents[::-1] if transposed else extents)

    return (
        f"one factor, one for each of {name}={rows}, {shape(rows, GROUP)} or {shape(cdiv(rows, GROUP), GROUP)} in "
        f"float32 for groups of {GROUP} along K, or {shape(rows, MX_GROUP)} in e8m0 for groups of {MX_GROUP}"
    )

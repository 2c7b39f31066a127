"""Which granularity scale factors have, and which families have products with them: no other module decides that.

Serving and capturing read the factors of a call here, so that what is captured and tuned is what is served.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.scaling import (
    GRANULARITIES,
    MX_DEPTH,
    NO_SCALES,
    NV_DEPTH,
    PADDED_ROWS,
    SCALED_BLOCK,
    WEIGHT_DEPTHS,
    ScalePair,
    Scaling,
    granularity,
)
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.numerics import scale_factors
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, ScaleLayout

EXPONENTS = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
_TYPES_OF = {"fp32": (torch.float32,), "e8m0": EXPONENTS}  # of factors that calls have; others are of weights alone
_BY_STRIDES = ("rows", "groups")  # layouts that strides show; the others are permutations within dense memory
_STORED = (("rows", (1, 1)), ("groups", (1, 1)), ("groups", (PADDED_ROWS, 1)))

# What a tensor's shape and strides can say, the simplest first. Where several hold, as of one row, they mean the same.
KNOWN = (
    Scaling(rows=0),
    Scaling(),
    *(Scaling(rows=rows, depth=SCALED_BLOCK, layout=at, pad=pad) for rows in (1, SCALED_BLOCK) for at, pad in _STORED),
    *(Scaling("e8m0", 1, MX_DEPTH, layout) for layout in _BY_STRIDES),
)
# How `quantize` stores the factors of activations in blocks, what PyTorch's own products want first.
_OF_ACTIVATIONS = tuple(
    Scaling(depth=SCALED_BLOCK, layout=at, pad=pad) for at, pad in (_STORED[1], _STORED[0], _STORED[2])
)

Ways: TypeAlias = tuple[Scaling, ...]  # in which one operand's factors can be read


def readings(
    problem: Problem, of_a: Sequence[Scaling | None], of_b: Sequence[Scaling | None], target: Target | None = None
) -> tuple[Problem, ...]:
    """Return the problems that a product with scale factors can be taken for, of all families.

    `of_a` and `of_b` are the ways in which the factors can be read, None that of an operand without any. Without a
    target they are problems for any GPU.
    """
    return tuple(made for made, possible in _candidates(problem, of_a, of_b, target) if possible)


def why_none(
    problem: Problem, of_a: Sequence[Scaling | None], of_b: Sequence[Scaling | None], target: Target | None = None
) -> str:
    """Return why `readings` has no problem for these arguments, with what the families that have such factors say."""
    refusals = dict.fromkeys(possible.reason for _, possible in _candidates(problem, of_a, of_b, target))
    why = "; ".join(refusals) or f"no family multiplies {problem.a.dtype} by {problem.b.dtype} with these"
    return f"scale factors of A {_in_words(of_a)} and of B {_in_words(of_b)}: {why}"


def _candidates(
    problem: Problem, of_a: Sequence[Scaling | None], of_b: Sequence[Scaling | None], target: Target | None
) -> Iterator[tuple[Problem, Support]]:
    """Yield the problems of families that have such factors, and whether the family and the target compute them."""
    for family in registry.every(Family):
        pairs = family.scalings(problem.a.dtype, problem.b.dtype)
        for pair in pairs:
            name = "" if pair == pairs[0] else granularity(pair)
            if pair[0] in of_a and pair[1] in of_b and (name or pair == pairs[0]):
                made = replace(problem, family=family.name).scaled((pair[0], pair[1]))
                yield made, family.computes(made) if target is None else family.supports(made, target)


def _in_words(ways: Sequence[Scaling | None]) -> str:
    """Return what the first of the ways covers, for messages."""
    if not ways or ways[0] is None:
        return "none" if ways else "of no known granularity"
    way, padded = ways[0], ", padded" if ways[0].pad != (1, 1) else ""
    stored = f", stored by {way.layout}{padded}" if way.depth else ""
    return f"for {way.rows or 'all rows'} x {way.depth or 'K'} ({way.dtype}{stored})"


def products_with(dtype: str, pair: ScalePair) -> tuple[Problem, ...]:
    """Return problems of ordinary sizes, one of each family that has A and B of a type with a pair of factors."""
    return readings(Problem(128, 256, 512, *matrices(dtype, c="bf16", layout="TN")), pair[:1], pair[1:])


def find_scalings(scales: Tensor, rows: int, k: int, layout: str = "") -> Ways:
    """Return the ways in which a tensor can hold the factors of an operand, the simplest first.

    Args:
        scales: the factors: one, one for each row, or [rows, groups along K] in blocks, row-major or with rows the
            fastest.
        rows: rows of the operand, of a weight [N, K] those too.
        k: its elements along K.
        layout: "" for what the strides show, or the name of a plug-in of numerics/scale_layouts.
    """
    return tuple(way for way in _asked_for(layout, *registry.names(Family)) if _holds(scales, way, rows, k))


def agreeing(of_a: Ways, of_b: Ways) -> tuple[Ways, Ways]:
    """Return the ways to read the factors of A and of B, without those that match no way of the other.

    Of a weight [16, 2048], 16 factors in one row are for its rows, or for groups along K: those of A decide.
    """
    along_a, along_b = ({way.depth > 0 for way in ways} for ways in (of_a, of_b))
    both = along_a & along_b
    if not both:
        return of_a, of_b
    return tuple(way for way in of_a if (way.depth > 0) in both), tuple(way for way in of_b if (way.depth > 0) in both)


def of_each(scales: Tensor, sizes: tuple[int, int, int], layout: str = "", turned: bool = False) -> Ways:
    """Return the ways in which the factors of one product of a batch can be read; none where they are not of the batch.

    Args:
        scales: of rows [rows], [batch, rows], [batch, rows, 1] or [batch, 1, rows], or along K [batch, …], each
            product's as of `find_scalings`.
        sizes: products of the batch, rows of the operand, and its elements along K.
        layout: as of `find_scalings`.
        turned: whether K comes first in factors along K, as it does in b.
    """
    batch, rows, k = sizes
    if scales.dim() == 3 and scales.shape[0] == batch:
        each = scales.mT if turned else scales
        # Of no product there is memory like that of one.
        one = each.select(0, 0) if batch else each.new_empty_strided(each.shape[1:], each.stride()[1:])
        ways = find_scalings(one, rows, k, layout)
        if any(way.depth for way in ways):
            return ways
    shapes = ((rows,), (batch, rows), (batch, rows, 1), (batch, 1, rows))
    is_vector = tuple(scales.shape) in shapes and scales.dtype == torch.float32 and not layout
    return find_scalings(torch.empty(rows, device="meta"), rows, k) if is_vector else ()


def quantised_by(scale: Tensor, ways: Ways) -> str:
    """Return the granularity of activations that are quantised for a weight with these factors."""
    if ways[0].dtype == "e8m0":
        return "mx"
    # Of a weight [16, 2048], [1, 16] is of blocks: factors of rows are [N], or [N, 1].
    in_groups = scale.dim() == 2 and scale.shape[1] > 1
    return "block" if in_groups and any(way.depth for way in ways) else "row"


def of_layer(scale: Tensor, sizes: tuple[int, int, int]) -> tuple[Ways, Ways]:
    """Return the ways to read the factors of quantised activations and of a weight [N, K]; `sizes` are M, N and K."""
    m, n, k = sizes
    ways = find_scalings(scale, n, k)
    if not ways:
        return (), ()
    if scale.numel() == 1:  # kernels read a factor for each row
        ways = find_scalings(torch.empty(n, device="meta"), n, k)
    if (wanted := quantised_by(scale, ways)) == "row":
        return agreeing(find_scalings(torch.empty((m, 1), device="meta"), m, k), ways)
    return agreeing((powers("rows"),) if wanted == "mx" else _OF_ACTIVATIONS, ways)


def of_groups(scale_b: Tensor | None, layout: str = "") -> ScalePair:
    """Return the factors of a grouped product's rows and of its weights, as kernels read them.

    Args:
        scale_b: None; float32 [groups, N], or [groups, N / 128, K / 128]; or powers of two [groups, …].
        layout: of powers of two, "" where they are in rows, or the name of a plug-in of numerics/scale_layouts.
    """
    if scale_b is None:
        return NO_SCALES
    if scale_b.dtype in EXPONENTS:
        return (powers(layout or "rows"),) * 2
    return GRANULARITIES["row" if scale_b.dim() == 2 else "block"]


def of_rows_beside(scale_a: Tensor | None, rows: int, weight: Scaling | None) -> ScalePair:
    """Return the factors of a grouped product's rows and of its weights of four bits, which are `weight`."""
    if scale_a is None or scale_a.dtype in EXPONENTS:
        return None if scale_a is None else powers("rows"), weight
    return GRANULARITIES["row" if scale_a.numel() == rows else "block"][0], weight


def of_four_bits(scale: Tensor, n: int, k: int, wide: torch.dtype) -> tuple[str, Scaling] | None:
    """Return the type of a weight [N, K] of four bits and its factors; None of factors that no such weight has.

    Args:
        scale: e8m0 [N, K / 32] or bfloat16 [K / 16, N] of fp4, or [K / 128, N] (or 64, 32) of int4, with zero points
            [K / 128, 2, N].
        n: rows of the weight.
        k: its numbers along K.
        wide: the type of factors of int4.

    Raises:
        InputError: they are of another type than such a weight has.
    """
    if scale.dtype in EXPONENTS:
        fits = tuple(scale.shape) == (n, k // MX_DEPTH) and not k % MX_DEPTH
        return ("fp4e2m1", powers("rows")) if fits else None
    zeros = scale.dim() == 3
    depth = cdiv(k, scale.shape[0]) if scale.dim() in (2, 3) and scale.shape[0] else 0
    of_fp4 = depth == NV_DEPTH and not zeros
    wanted = torch.bfloat16 if of_fp4 else wide
    if scale.dtype != wanted:
        raise InputError(
            f"scale is {scale.dtype}; of fp4 it is e8m0 (uint8), of int4 x's type: convert it to {wanted} once"
        )
    fits = (of_fp4 or depth in WEIGHT_DEPTHS) and not k % depth
    if not fits or tuple(scale.shape) != (k // depth, *(2,) * zeros, n):
        return None
    scaling = GRANULARITIES[f"weight_{depth}{'_zeros' * zeros}{'_fp16' * (wanted == torch.float16)}"][1]
    assert scaling is not None
    return "fp4e2m1" if of_fp4 else "int4", scaling


@cache
def powers(layout: str) -> Scaling:
    """Return powers of two for each 32 elements along K, in rows or in the layout that a plug-in describes."""
    pad = (1, 1) if layout in _BY_STRIDES else registry.get(ScaleLayout, layout).pad
    return Scaling("e8m0", depth=MX_DEPTH, layout=layout, pad=pad)


@cache
def _asked_for(layout: str, *families: str) -> Ways:
    """Return all ways of a layout, known or of families; "" for those that strides show."""
    found = dict.fromkeys(KNOWN)
    for family in registry.every(Family):
        for dtype in DTYPES:
            try:
                pairs = family.scalings(dtype, dtype)
            except (InputError, UnavailableError):
                continue
            found |= dict.fromkeys(scaling for pair in pairs for scaling in pair if scaling is not None)
    return tuple(way for way in found if (way.layout == layout if layout else way.layout in _BY_STRIDES))


def _holds(scales: Tensor, scaling: Scaling, rows: int, k: int) -> bool:
    """Return whether a tensor's dtype, shape and strides are those of a scaling; arguments as for `find_scalings`."""
    if scales.dtype not in _TYPES_OF.get(scaling.dtype, ()):
        return False
    extents = scaling.shape(rows, k)
    if scaling.layout not in _BY_STRIDES:
        return tuple(scales.shape) == extents and scales.is_contiguous()
    if not scaling.depth:
        longest = [size for size in scales.shape if size != 1]
        return scales.numel() == extents[0] and scales.dim() <= 2 and len(longest) <= 1 and scales.is_contiguous()
    across, groups = given_shape(scaling, rows, k)
    if tuple(scales.shape) != (across, groups):
        return False
    if not scales.numel():
        return True  # the strides of no numbers say nothing
    along_rows, along_k = (1, extents[1]) if scaling.layout == "groups" else (extents[1], 1)
    return (across == 1 or scales.stride(0) == along_rows) and (groups == 1 or scales.stride(1) == along_k)


def given_shape(scaling: Scaling, rows: int, k: int) -> tuple[int, int]:
    """Return the shape of an operand's factors in calls: [rows, groups along K], padded in layouts of plug-ins."""
    if scaling.layout not in _BY_STRIDES:
        return scaling.shape(rows, k)
    return cdiv(rows, scaling.rows) if scaling.rows else 1, cdiv(k, scaling.depth) if scaling.depth else 1


def spread(scales: Tensor, scaling: Scaling, rows: int, k: int) -> Tensor:
    """Return the factors in float32 so that they broadcast over an operand [rows, K]."""
    if not scaling.depth:
        return scales.reshape(-1, 1)
    stored = scaling._replace(layout="rows") if scaling.layout in _BY_STRIDES else scaling
    return scale_factors.spread(stored, scales, rows, k, torch.float32)


def describe_known(rows: int, k: int, name: str, transposed: bool = False, layout: str = "") -> str:
    """Return the shapes that factors of an operand may have, for messages.

    `name` is what the operand's rows are called. Of a transposed operand K comes first in the factors too. `layout` is
    as of `find_scalings`.
    """
    if layout:
        extents = powers(layout).shape(rows, k)[:: -1 if transposed else 1]
        return f"{extents} in e8m0 for groups of {MX_DEPTH} along K, padded and dense, in the layout {layout}"

    def shape(across: int, group: int) -> str:
        extents = (across, cdiv(k, group))
        return str(extents[::-1] if transposed else extents)

    blocks = shape(cdiv(rows, SCALED_BLOCK), SCALED_BLOCK)
    return (
        f"one factor, one for each of {name}={rows}, {shape(rows, SCALED_BLOCK)} or {blocks} in float32 for groups of "
        f"{SCALED_BLOCK} along K, or {shape(rows, MX_DEPTH)} in e8m0 for groups of {MX_DEPTH}"
    )

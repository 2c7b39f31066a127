"""Which family and granularity scale factors are of, by their shapes and strides, as `core.scaling` names them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import SCALED_BLOCK

# By how the factors of A, then of the weight, lie over it; where the name is "", it is the family's usual one.
_FAMILIES = {
    ("one", "one"): ("a8w8", "tensor"),
    ("row", "row"): ("a8w8", ""),
    ("groups", "block"): ("a8w8_blockscale", ""),
    ("rows", "block"): ("a8w8_blockscale", "block_rows"),
    ("groups", "groups"): ("a8w8_blockscale", "group"),
    ("rows", "rows"): ("a8w8_blockscale", "group_rows"),
}


def find_family(scale_a: Tensor, scale_b: Tensor, sizes: tuple[int, int, int]) -> tuple[str, str, str]:
    """The family and the granularity of scale factors, and why none has them; all texts, "" where there is nothing.

    Args:
        scale_a: factors of A [M, K].
        scale_b: factors of the weight [N, K].
        sizes: M, N and K.
    """
    if (scale_a.dtype, scale_b.dtype) != (torch.float32, torch.float32):
        return "dense", "", f"scale factors of {str(scale_a.dtype).removeprefix('torch.')}"
    m, n, k = sizes
    ways_a, ways_b = {*_ways(scale_a, m, k)}, {*_ways(scale_b, n, k)}
    for (of_a, of_b), found in _FAMILIES.items():
        if of_a in ways_a and of_b in ways_b:
            return (*found, "")
    return "dense", "", "scale factors of blocks of other sizes or orders"


def _ways(scales: Tensor, rows: int, k: int) -> Iterator[str]:
    """How factors may lie over an operand [rows, K]: of few rows, or a short K, several ways are one."""
    shape, groups = tuple(scales.shape), cdiv(k, SCALED_BLOCK)
    if scales.numel() == 1:
        yield "one"
    if [size for size in shape if size != 1] in ([rows], [] if rows == 1 else [rows]):
        yield "row"
    if shape == (cdiv(rows, SCALED_BLOCK), groups):
        yield "block"
    if shape == (rows, groups):
        yield from ("groups",) * (rows == 1 or scales.stride(0) == 1)
        yield from ("rows",) * (groups == 1 or scales.stride(1) == 1)

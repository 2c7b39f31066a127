"""Choices of parameters in which every two values meet: far fewer than all, where a fault needs no three of them."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, such that each two values of different axes share a row; always the same."""
    rows = covering(list(product(*map(range, map(len, axes)))))
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in rows]


def covering(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of these rows, such that each two values that share a row share one of them; always the same."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    kept = []
    while missing:
        best = max(pairs, key=lambda row: len(missing & pairs[row]))  # the first of those that add most
        missing -= pairs[best]
        kept.append(best)
    return kept

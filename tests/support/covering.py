"""Choices of parameters in which every two values meet: far fewer than all, where a fault needs no three of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, such that each two values of different axes share a row; always the same."""
    rows = list(product(*map(range, map(len, axes))))
    missing = {pair for row in rows for pair in _pairs(row)}
    kept = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))  # the first of those that add most
        missing -= _pairs(best)
        kept.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return kept


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """The pairs of places and values in a row."""
    return set(combinations(enumerate(row), 2))

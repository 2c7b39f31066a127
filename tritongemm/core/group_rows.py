"""The spread of a grouped product's rows over its groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from tritongemm.core.errors import InputError

GROUP_FORMS = ("contiguous", "masked")
SPREADS = ("uniform", "skewed", "captured")
MOST_GROUPS = 4096  # a kernel holds the rows of all in registers
_SKEW = 1.0  # group i of a skewed spread has a share in proportion to (i + 1) ** -_SKEW
_SEED = 19  # seed of the unknown order of groups
_ROUNDED = 1e-3  # what the sum of shares may lack where each was rounded


def row_counts(rows: int, groups: int, spread: str) -> tuple[int, ...]:
    """Return the number of rows of each group, which add up to `rows`.

    Args:
        rows: of all groups together.
        groups: number of groups.
        spread: ``uniform``: as even as possible; ``skewed``: few groups have most of the rows, as with a model whose
            router prefers some experts, in an arbitrary order.
    """
    if spread == "uniform":
        return tuple(rows // groups + (i < rows % groups) for i in range(groups))
    return counts_of_shares(rows, [(i + 1) ** -_SKEW for i in range(groups)])


def counts_of_shares(rows: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rows of each group, given their shares, in a fixed arbitrary order.

    Args:
        rows: of all groups together.
        shares: of the groups, in any order, with any sum above 0.
    """
    counts = list(apportion(rows, shares))
    random.Random(_SEED).shuffle(counts)
    return tuple(counts)


def apportion(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide rows in proportion to weights, in their order: integers that add up to `rows`."""
    total = sum(weights)
    shares = [rows * weight / total for weight in weights]
    counts = [int(share) for share in shares]
    for i in sorted(range(len(counts)), key=lambda i: (counts[i] - shares[i], i))[: rows - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def check_shares(groups: int, shares: Sequence[float]) -> None:
    """Refuse invalid shares of groups.

    Args:
        groups: number of groups.
        shares: the share of all rows that each has, from 0 to 1.

    Raises:
        InputError: says what is wrong with them.
    """
    if len(shares) != groups:
        raise InputError(f"{len(shares)} shares of rows for {groups} groups")
    if not all(0 <= share <= 1 for share in shares):
        raise InputError("each share of a group must be a number from 0 to 1")
    if abs(sum(shares) - 1) > _ROUNDED:
        raise InputError(f"the groups' shares add up to {sum(shares):.6g}, not to 1")


def group_ends(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the end row of each group, if all rows follow each other."""
    return tuple(accumulate(counts))


def check_groups(rows: int, groups: int, form: str, spread: str, counts: Sequence[int], room: int) -> None:
    """Refuse invalid groups.

    Args:
        rows: of all groups together.
        groups: number of groups.
        form: one of `GROUP_FORMS`.
        spread: one of `SPREADS`.
        counts: rows of each group, if they were captured.
        room: rows that each group of the masked form has room for.

    Raises:
        InputError: says what does not add up.
    """
    if groups > MOST_GROUPS:
        raise InputError(f"{groups} groups; a kernel holds the rows of at most {MOST_GROUPS}")
    if form not in GROUP_FORMS:
        raise InputError(f"group_form must be one of {', '.join(GROUP_FORMS)}, not {form!r}")
    if spread not in SPREADS:
        raise InputError(f"spread must be one of {', '.join(SPREADS)}, not {spread!r}")
    if (spread == "captured") != bool(counts):
        raise InputError("spread captured and the counts of rows belong together; name both or neither")
    if counts:
        if len(counts) != groups:
            raise InputError(f"{len(counts)} counts of rows for {groups} groups")
        if any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in counts):
            raise InputError("each count of a group's rows must be a whole number of at least 0")
        if sum(counts) != rows:
            raise InputError(f"the groups' rows add up to {sum(counts)}, M is {rows}")
    if (form == "masked") != (room > 0):
        raise InputError(
            "the masked form needs the rows that each group has room for (--room, in a file group_room); "
            "the contiguous form has none"
        )
    if room:
        most = max(counts or row_counts(rows, groups, spread))
        if most > room:
            raise InputError(f"a group has {most} rows, and room for {room}")

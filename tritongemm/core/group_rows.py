"""The class `Groups`, which is the products of different M that share a call, and how rows are spread over them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.values import check_size

GROUP_FORMS = ("contiguous", "masked")
SPREADS = ("uniform", "skewed", "captured")
MOST_GROUPS = 4096  # a kernel holds the rows of all in registers
_SKEW = 1.0  # group i of a skewed spread has a share in proportion to (i + 1) ** -_SKEW
_SEED = 19  # seed of the unknown order of groups
_ROUNDED = 1e-3  # what the sum of shares may lack where each was rounded


@dataclass(frozen=True)
class Groups:
    """The products of different M that share one call, as of a mixture of experts."""

    count: int  # number of products, at least 2
    # 0 of the contiguous form: A is [M, K], the rows of each group after those of the last, and the operand `offsets`
    # has the end of each. In the masked form the rows that each group has room for: A is [count, room, K], and the
    # operand `counts` has the rows of each.
    room: int = 0
    # Of rows over groups in tuning: `uniform`, `skewed`, or `captured`: as in `counts`. Kernels read the numbers of
    # rows on the device, and are correct for any spread.
    spread: str = "uniform"
    counts: tuple[int, ...] = ()  # the rows of each group, where they were captured

    def __post_init__(self) -> None:
        if check_size("GROUPS", self.count) == 1:
            raise InputError("group_form, spread, counts and room are of a product of several groups")
        if self.count > MOST_GROUPS:
            raise InputError(f"{self.count} groups; a kernel holds the rows of at most {MOST_GROUPS}")
        if self.spread not in SPREADS:
            raise InputError(f"spread must be one of {', '.join(SPREADS)}, not {self.spread!r}")
        if (self.spread == "captured") != bool(self.counts):
            raise InputError("spread captured and the counts of rows belong together; name both or neither")
        if self.counts and len(self.counts) != self.count:
            raise InputError(f"{len(self.counts)} counts of rows for {self.count} groups")
        if any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in self.counts):
            raise InputError("each count of a group's rows must be a whole number of at least 0")

    def row_counts(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each group in tuning, which add up to `rows`."""
        return self.counts or row_counts(rows, self.count, self.spread)

    def require_rows(self, rows: int) -> None:
        """Refuse, by an InputError, a number of rows that the groups do not have, or have no room for."""
        if self.counts and sum(self.counts) != rows:
            raise InputError(f"the groups' rows add up to {sum(self.counts)}, M is {rows}")
        if self.room and (most := max(self.row_counts(rows))) > self.room:
            raise InputError(f"a group has {most} rows, and room for {self.room}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values of a problem, only those that are not at their defaults."""
        said: dict[str, Any] = {"groups": self.count, "group_form": "masked" if self.room else ""}
        said |= {"spread": "" if self.spread == "uniform" else self.spread, "counts": list(self.counts)}
        return {key: value for key, value in (said | {"room": self.room}).items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Groups | None:
        """Return the groups among the values of a problem, as `to_json` wrote them; None where it has one group."""
        form, spread, counts, room = (data.get(key, default) for key, default in _ONE_GROUP.items())
        count = check_size("GROUPS", data.get("groups", 1))
        if count == 1 and (form, spread, tuple(counts), room) == tuple(_ONE_GROUP.values()):
            return None
        if form not in GROUP_FORMS:
            raise InputError(f"group_form must be one of {', '.join(GROUP_FORMS)}, not {form!r}")
        if (form == "masked") != (room > 0):
            raise InputError(
                "the masked form needs the rows that each group has room for (--room, in a file group_room); "
                "the contiguous form has none"
            )
        return cls(count, room, spread, tuple(counts))


_ONE_GROUP: dict[str, Any] = {"group_form": "contiguous", "spread": "uniform", "counts": (), "room": 0}


def row_counts(rows: int, groups: int, spread: str) -> tuple[int, ...]:
    """Return the number of rows of each group, which add up to `rows`.

    A spread ``uniform`` is as even as possible; ``skewed``: few groups have most of the rows, as with a model whose
    router prefers some experts, in an arbitrary order.
    """
    if spread == "uniform":
        return tuple(rows // groups + (i < rows % groups) for i in range(groups))
    return counts_of_shares(rows, [(i + 1) ** -_SKEW for i in range(groups)])


def counts_of_shares(rows: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rows of each group, given their shares, in a fixed arbitrary order."""
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
    """Refuse invalid shares of groups. Raises InputError: says what is wrong with them."""
    if len(shares) != groups:
        raise InputError(f"{len(shares)} shares of rows for {groups} groups")
    if not all(0 <= share <= 1 for share in shares):
        raise InputError("each share of a group must be a number from 0 to 1")
    if abs(sum(shares) - 1) > _ROUNDED:
        raise InputError(f"the groups' shares add up to {sum(shares):.6g}, not to 1")


def group_ends(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the end row of each group, if all rows follow each other."""
    return tuple(accumulate(counts))

"""The class `ReductionOrder`, which is the order in which a kernel adds up the products of one element of C."""

from __future__ import annotations

from dataclasses import dataclass

from tritongemm.core.integers import cdiv


@dataclass(frozen=True)
class ReductionOrder:
    """The order in which a kernel adds up the K products of one element of C.

    Two kernels with equal orders give equal bits. Sums of integers are exact in any order.
    """

    k: int = 0  # number of products; 0 of exact sums, whose order does not matter
    # Consecutive products that are added up from zero; the sums of these runs are added from the first to the last.
    run: int = 0
    # Consecutive products of a run whose sum is one by itself before it is scaled and added in float32; 0 where there
    # are no such blocks.
    block: int = 0
    unit: str = ""  # what adds up products, where others of the same device round otherwise, such as `wgmma`; else ""
    sums: str = ""  # how sums of runs are added, where not one after the other; else ""

    @property
    def runs(self) -> int:
        """Number of the runs; 1 where K is not split, and of exact sums."""
        return cdiv(self.k, self.run) if self.k else 1

    def __str__(self) -> str:
        """Return the text by which rows name the order, such as ``4x1024`` or ``1x7168 blocks of 128 by wgmma``."""
        if not self.k:
            return "exact"
        words = [f"{self.runs}x{self.run}"]
        words += [f"blocks of {self.block}"] if self.block else []
        words += [f"by {self.unit}"] if self.unit else []
        words += [self.sums] if self.sums else []
        return " ".join(words)


PAIRS = "pairwise"  # sums of neighbouring runs, then the sums of those, as of ranks that have an equal share of K
EXACT = ReductionOrder()

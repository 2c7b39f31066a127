"""Stage: a launchable candidate → its error against the reference.

C is poisoned first, so an element nobody wrote shows; it runs twice, so counters a launch leaves behind show too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from tritongemm.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What verification found.

    Attributes:
        error: as the family measures it; infinite if an element was not written.
        tolerance: largest error allowed.
        repeatable: two runs gave the same bits.
    """

    error: float
    tolerance: float
    repeatable: bool

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def reason(self) -> str:
        return "" if self.ok else f"error {self.error:.3g} > {self.tolerance:.3g}"


def poison(c: Tensor) -> None:
    """Fill with NaN, or with a value far from any result where the dtype has none."""
    if c.dtype.is_floating_point:
        c.fill_(float("nan"))
    else:
        c.fill_(-77 if c.element_size() == 1 else -(2**31) + 7)


def verify(problem: Problem, family: ModuleType, run: Callable[[], None], c: Tensor, exact: Tensor) -> Verdict:
    """Run a candidate twice on a poisoned C and compare.

    Args:
        problem: what it computes.
        family: its module, for the error and the tolerance.
        run: launches the candidate and waits for it.
        c: where it writes [M, N].
        exact: float64 reference [M, N].
    """
    import torch

    poison(c)
    run()
    first = c.view(torch.uint8).clone() if c.element_size() == 1 else c.clone()
    error = family.deviation(c, exact)
    poison(c)
    run()
    again = family.deviation(c, exact)
    second = c.view(torch.uint8) if c.element_size() == 1 else c
    return Verdict(max(error, again), family.tolerance(problem), bool(torch.equal(first, second)))

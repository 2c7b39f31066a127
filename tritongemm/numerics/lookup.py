"""Questions about a problem that its family answers."""

from __future__ import annotations

from functools import lru_cache

from tritongemm.core.operands import OperandSpec, bias
from tritongemm.core.problem import Problem
from tritongemm.plugins import registry


@lru_cache(maxsize=4096)
def extras(problem: Problem) -> tuple[OperandSpec, ...]:
    """What the problem's family has beside A and B, in the order in which the epilogue applies it."""
    family = registry.load("families", problem.family)
    found: tuple[OperandSpec, ...] = getattr(family, "extras", bias)(problem)
    return found


@lru_cache(maxsize=4096)
def shuffled_b(problem: Problem) -> bool:
    """Whether B comes in the order of some assembly kernels, which nobody else reads."""
    return bool(getattr(registry.load("families", problem.family), "SHUFFLED_B", False))

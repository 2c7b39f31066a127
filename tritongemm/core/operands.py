"""The nouns `Operand` and `Operands`: what a GEMM reads beside A and B, and all that it reads and writes as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tritongemm.core.dtypes import DType
from tritongemm.core.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

# A [M, K] and B [K, N] as ``a`` and ``b``, a family's other operands by their names; where something is computed, C [M, N]
# as ``c``.
Operands: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class OperandSpec:
    """One operand beside A and B, dense.

    Attributes:
        name: ``bias``, ``scale_a``, ``scale_b`` …
        dtype: of its elements.
        shape: [M, 1] or [N], so that it broadcasts over C, where the epilogue applies it.
        operator: ``+`` or ``*``: how the epilogue applies it to the sum over K, before C is rounded; "" where it does not,
            as with scales that change along K.
        typical: size of the random numbers it is filled with.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    operator: str
    typical: float = 1.0

    @property
    def along(self) -> str:
        """``m`` for one value per row of C, ``n`` for one per column."""
        return "m" if len(self.shape) == 2 else "n"

    @property
    def count(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


def bias(problem: Problem) -> tuple[OperandSpec, ...]:
    """The problem's bias as the last of its operands; none where it has none."""
    shapes = {"m": (problem.m, 1), "n": (problem.n,)}
    return (OperandSpec("bias", problem.bias_dtype, shapes[problem.bias], "+"),) if problem.bias in shapes else ()

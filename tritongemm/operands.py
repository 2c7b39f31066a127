"""The nouns `Operand` and `Operands`: what a GEMM reads beside A and B, and all that it reads and writes as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from tritongemm import registry
from tritongemm.dtypes import DType
from tritongemm.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

# A [M, K] and B [K, N] as ``a`` and ``b``, a family's other operands by their names; where something is computed, C [M, N]
# as ``c``.
Operands: TypeAlias = "dict[str, Tensor]"
ALIGNED = 512  # bytes; what an allocator gives


@dataclass(frozen=True)
class Operand:
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


@lru_cache(maxsize=4096)
def extras(problem: Problem) -> tuple[Operand, ...]:
    """What the problem's family has beside A and B, in the order in which the epilogue applies it."""
    family = registry.load("families", problem.family)
    found: tuple[Operand, ...] = getattr(family, "extras", bias)(problem)
    return found


@lru_cache(maxsize=4096)
def shuffled_b(problem: Problem) -> bool:
    """Whether B comes in the order of some assembly kernels, which nobody else reads."""
    return bool(getattr(registry.load("families", problem.family), "SHUFFLED_B", False))


def bias(problem: Problem) -> tuple[Operand, ...]:
    """The problem's bias as the last of its operands; none where it has none."""
    shapes = {"m": (problem.m, 1), "n": (problem.n,)}
    return (Operand("bias", problem.bias_dtype, shapes[problem.bias], "+"),) if problem.bias in shapes else ()


def side_by_side(tensors: Operands, count: int) -> list[Operands]:
    """So many copies of all tensors in one piece of memory.

    Where operands lie is worth up to 4 % of a time on an H200, and pieces of an allocator lie elsewhere in each process.
    """
    import torch

    sizes = [-(-t.numel() * t.element_size() // ALIGNED) * ALIGNED for t in tensors.values()]
    slab = torch.empty(count * sum(sizes), dtype=torch.uint8, device=tensors["a"].device)
    places = iter(slab.split(sizes * count))

    def copied(tensor: Tensor) -> Tensor:
        place = next(places)[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    return [{name: copied(tensor) for name, tensor in tensors.items()} for _ in range(count)]

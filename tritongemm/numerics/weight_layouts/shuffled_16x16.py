"""B in the order in which AITER's ``bpreshuffle`` kernels read it (its `shuffle_weight`, layout 16 x 16).

B is [N, K] rows then. Blocks of 16 rows and 32 elements follow each other, first along K; in a block, 16 bytes of each of
its rows, then the next 16 bytes of each, so that a wave reads 16 bytes a thread without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target

if TYPE_CHECKING:
    from torch import Tensor

Unsupported: TypeAlias = "Callable[[Problem, Target], str | None]"
Inputs: TypeAlias = "Callable[..., Operands]"
Reference: TypeAlias = "Callable[[Problem, Operands], Tensor]"

ROWS, DEPTH, UNIT = 16, 32, 16  # rows and elements of a block, bytes of a row that stay together


def unsupported(problem: Problem) -> str | None:
    """Why there is no such order of a problem's B, or None."""
    depth = DEPTH * problem.b.packed
    if problem.layout != "TN" or problem.n % ROWS or problem.k % depth:
        return f"family {problem.family} wants A row-major, B column-major (-col_b), N a multiple of {ROWS} and K of {depth}"
    return None


def shuffled(b: Tensor) -> Tensor:
    """B [K, N], column-major, in the kernels' order; of packed elements K counts bytes."""
    return _permuted(b, lambda blocks, depth, pieces: (blocks, ROWS, depth, pieces, UNIT), (0, 2, 3, 1, 4))


def plain(b: Tensor) -> Tensor:
    """What `shuffled` was given."""
    return _permuted(b, lambda blocks, depth, pieces: (blocks, depth, pieces, ROWS, UNIT), (0, 3, 1, 2, 4))


def of(family: ModuleType) -> tuple[Unsupported, Inputs, Reference]:
    """`unsupported`, `inputs` and `reference` of a family that is as another but for the order of B."""

    def refused(problem: Problem, target: Target) -> str | None:
        return family.unsupported(problem, target) or unsupported(problem)

    def inputs(problem: Problem, device: str, init: str = "randn", seed: int = 0) -> Operands:
        operands: Operands = family.inputs(problem, device, init, seed)
        return operands | {"b": shuffled(operands["b"])}

    def reference(problem: Problem, operands: Operands) -> Tensor:
        exact: Tensor = family.reference(problem, operands | {"b": plain(operands["b"])})
        return exact

    return refused, inputs, reference


def _permuted(b: Tensor, shape: Callable[[int, int, int], tuple[int, ...]], order: tuple[int, ...]) -> Tensor:
    import torch

    k, n = b.shape
    pieces = DEPTH * b.element_size() // UNIT
    rows = b.T.contiguous().view(torch.uint8)
    mixed = rows.reshape(shape(n // ROWS, k // DEPTH, pieces)).permute(order).reshape(rows.shape)
    return mixed.contiguous().view(b.dtype).T

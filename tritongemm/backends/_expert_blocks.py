"""Rows of groups as servers' kernels of experts read them: numbers of rows in blocks, each of one expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritongemm.core.integers import cdiv

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExpertBlocks:
    """Rows dealt out to blocks, each of which belongs to one expert.

    Attributes:
        rows: the rows of each block, one block after the other, with the number of all rows where a block has none;
            as long as it must be for the most unevenly spread rows. None where each row is a block.
        experts: the expert of each block.
        used: how many entries of `rows` count.
    """

    rows: Tensor | None
    experts: Tensor
    used: Tensor


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """The expert of each row.

    Args:
        ends: the row after the last of each group.
        rows: how many there are.
    """
    import torch

    numbers = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends.to(torch.int64), numbers, right=True).to(torch.int32)


def one_row_each(ends: Tensor, rows: int, block: int) -> ExpertBlocks:
    """A block for each row, in which it is the only one.

    Args:
        ends: the row after the last of each group.
        rows: how many there are.
        block: rows that a block has room for.
    """
    import torch

    used = torch.full((1,), rows * block, dtype=torch.int32, device=ends.device)
    return ExpertBlocks(None, experts_of_rows(ends, rows), used)


def aligned(ends: Tensor, rows: int, block: int) -> ExpertBlocks:
    """Blocks of so many rows, the last of each group filled up.

    Args:
        ends: the row after the last of each group.
        rows: how many there are.
        block: rows of a block.
    """
    import torch

    groups, where = len(ends), {"dtype": torch.int32, "device": ends.device}
    room = rows + groups * (block - 1)
    room = min(room, rows * block) if rows < groups else room
    experts = experts_of_rows(ends, rows)
    counts = torch.bincount(experts, minlength=groups)
    blocks = (counts + block - 1) // block
    first_row, first_block = (torch.cumsum(counts_, 0) - counts_ for counts_ in (counts, blocks))
    numbers = torch.arange(rows, device=ends.device)
    places = first_block[experts] * block + numbers - first_row[experts]
    order = torch.full((room,), rows, **where)
    order[places] = numbers.to(torch.int32)
    of_blocks = torch.zeros(cdiv(room, block), **where)
    known = torch.repeat_interleave(torch.arange(groups, device=ends.device), blocks)
    of_blocks[: len(known)] = known.to(torch.int32)
    return ExpertBlocks(order, of_blocks, (blocks.sum() * block).to(torch.int32).reshape(1))

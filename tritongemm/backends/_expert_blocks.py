"""The blocks of row indices, each of one expert, that servers' expert kernels read."""

from dataclasses import dataclass

from tritongemm.core.integers import cdiv
from tritongemm.core.operands import Tensor


@dataclass(frozen=True)
class ExpertBlocks:
    """The assignment of rows to blocks, each of which belongs to one expert."""

    # The rows of each block, one block after the other, padded with the total number of rows; long enough for the most
    # uneven spread. None if each row is a block.
    rows: Tensor | None
    experts: Tensor  # the expert of each block
    used: Tensor  # the number of valid entries of `rows`


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each row."""
    import torch

    numbers = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends.to(torch.int64), numbers, right=True).to(torch.int32)


def one_row_each(ends: Tensor, rows: int, block: int) -> ExpertBlocks:
    """Return blocks that contain a single row each."""
    import torch

    used = torch.full((1,), rows * block, dtype=torch.int32, device=ends.device)
    return ExpertBlocks(None, experts_of_rows(ends, rows), used)


def aligned(ends: Tensor, rows: int, block: int) -> ExpertBlocks:
    """Return blocks of `block` rows, the last of each group padded."""
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

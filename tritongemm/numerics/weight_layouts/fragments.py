"""Weight layout: four bits a number, in the order in which matrix instructions of 16 x 16 want them in registers.

Blocks of 16 columns and 64 elements along K follow each other, first along K. In a block each of 32 threads has 16
bytes, which it loads at once: eight words of 16 bits, each of four numbers that are 16 apart along K.
"""

from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins.contracts import WeightLayout

COLUMNS, DEPTH = 16, 64  # of a block
# A block's columns: half of them, then one of a half. Along K: the number in a word, half of an instruction's depth,
# the thread, the word of a pair. In memory: threads, then halves of the depth and of the columns, the pair, the number.
_PLAIN = (2, 8, -1, 4, 2, 4, 2)  # with the blocks along K between
_STORED = (-1, 8, 4, 2, 2, 2, 4)
_TO_STORED, _TO_PLAIN = (2, 1, 5, 4, 0, 6, 3), (4, 1, 0, 6, 3, 2, 5)


class Fragments(WeightLayout):
    """Blocks of 16 columns of B, of which each is the left operand of four matrix instructions."""

    fastest_on = ("sm90",)

    def supports(self, problem: Problem) -> Support:
        """Return whether a problem's B divides into blocks."""
        of_a = problem.a.scaling
        four_bits = problem.b.type.packed == 2 and problem.a.type.packed == 1 and (of_a is None or not of_a.depth)
        if four_bits and problem.layout == "TN" and problem.n % COLUMNS == 0 and problem.k % DEPTH == 0:
            return SUPPORTED
        return Support(
            "B in the order fragments is a weight of four bits, column-major (-col_b), beside a row-major "
            f"A without factors that change along K, with N a multiple of {COLUMNS} and K of {DEPTH}"
        )

    def fragments(self) -> bool:
        """Return True."""
        return True

    def apart(self) -> int:
        """Return the elements along K between the numbers of a word."""
        return DEPTH // 4

    def pack(self, b: Tensor) -> Tensor:
        """Return B [K / 2, N] of bytes, column-major, with its numbers in this order."""
        return _permuted(b, _PLAIN, _TO_STORED)

    def unpack(self, b: Tensor) -> Tensor:
        """Return the argument of `pack`."""
        return _permuted(b, _STORED, _TO_PLAIN)


def _permuted(b: Tensor, dimensions: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return bytes [K / 2, N], column-major, with each 16 columns' numbers, of these dimensions, in another order."""
    import torch

    rows = b.mT.contiguous()
    numbers = torch.stack((rows & 15, rows >> 4), -1).reshape(-1, COLUMNS * 2 * rows.shape[-1])
    mixed = numbers.unflatten(-1, dimensions).permute(0, *(1 + place for place in order)).reshape(*rows.shape, 2)
    return (mixed[..., 0] | mixed[..., 1] << 4).mT

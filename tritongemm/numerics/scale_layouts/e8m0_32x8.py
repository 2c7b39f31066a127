"""Scale layout: e8m0 factors in the order of CDNA4's matrix instructions, AITER's `e8m0_shuffle`.

Blocks of 32 rows and 8 groups follow each other; rows and groups are padded to complete blocks.
"""

from typing import ClassVar

from tritongemm.core.operands import Tensor
from tritongemm.plugins.contracts import ScaleLayout

ROWS, GROUPS = 32, 8  # of a block


class E8m0Blocks(ScaleLayout):
    """Blocks of 32 x 8 factors, each as a matrix instruction reads it.

    A block has a word for each of 4 groups and 16 rows: the group and the one 4 further, of the row and the one 16
    further.
    """

    pad: ClassVar[tuple[int, int]] = (ROWS, GROUPS)
    row_place: ClassVar[str] = "r // 32 * (32 * groups) + r % 16 * 4 + r // 16 % 2"
    group_place: ClassVar[str] = "g // 8 * 256 + g % 4 * 64 + g // 4 % 2 * 2"
    block: ClassVar[tuple[int, ...]] = (GROUPS // 2, ROWS // 2, 2, 2)
    axes: ClassVar[tuple[int, ...]] = (0, 5, 3, 1, 4, 2)

    def pack(self, scales: Tensor) -> Tensor:
        """Return the factors [rows, groups], of complete blocks, in the order of the matrix instructions."""
        rows, groups = scales.shape
        blocks = scales.reshape(rows // ROWS, 2, ROWS // 2, groups // GROUPS, 2, GROUPS // 2)
        return blocks.permute(0, 3, 5, 2, 4, 1).reshape(rows, groups)

    def unpack(self, scales: Tensor) -> Tensor:
        """Return the argument of `pack`."""
        rows, groups = scales.shape
        return scales.reshape(rows // ROWS, groups // GROUPS, *self.block).permute(self.axes).reshape(rows, groups)

"""Scale layout: a toy, blocks of four rows, of which the factors of one group are side by side."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tritongemm.plugins.contracts import ScaleLayout

ROWS = 4  # of a block


class RowBlocks(ScaleLayout):
    """Blocks of four rows follow each other; a block has four factors of its first group, then of its second."""

    pad: ClassVar[tuple[int, int]] = (ROWS, 1)
    row_place: ClassVar[str] = "r // 4 * (4 * groups) + r % 4"
    group_place: ClassVar[str] = "g * 4"

    def pack(self, scales: Tensor) -> Tensor:
        """Factors [rows, groups along K], of complete blocks, in this order."""
        rows, groups = scales.shape
        return scales.reshape(rows // ROWS, ROWS, groups).permute(0, 2, 1).reshape(rows, groups)

    def unpack(self, scales: Tensor) -> Tensor:
        """What `pack` was given."""
        rows, groups = scales.shape
        return scales.reshape(rows // ROWS, groups, ROWS).permute(0, 2, 1).reshape(rows, groups)

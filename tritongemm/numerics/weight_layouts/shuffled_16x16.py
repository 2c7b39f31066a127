"""Weight layout: B in the order of AITER's ``bpreshuffle`` kernels (its `shuffle_weight`, layout 16 x 16).

B is [N, K] rows then. Blocks of 16 rows and 32 elements follow each other, first along K; in a block, 16 bytes of each
of its rows, then the next 16 bytes of each, so that a wave reads 16 bytes a thread without gaps.
"""

from collections.abc import Callable

from tritongemm.core.dtypes import DType
from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins.contracts import Pieces, WeightLayout

ROWS, DEPTH, UNIT = 16, 32, 16  # rows and elements of a block, bytes of a row that stay together


class Shuffled16x16(WeightLayout):
    """Blocks of 16 columns of B, as AITER's kernels read them."""

    def supports(self, problem: Problem) -> Support:
        """Return whether a problem's B divides into blocks."""
        depth = DEPTH * problem.b.type.packed
        if problem.layout != "TN" or problem.n % ROWS or problem.k % depth:
            return Support(
                f"B in the order shuffled_16x16 wants A row-major, B column-major (-col_b), N a multiple of {ROWS} and "
                f"K of {depth}"
            )
        return SUPPORTED

    def pieces(self, dtype: DType) -> Pieces:
        """Return sixteen columns, 16 bytes of each in turn; as blocks follow each other along K, so do their pieces."""
        return Pieces(ROWS, UNIT // dtype.bytes)

    def pack(self, b: Tensor) -> Tensor:
        """Return B [K, N], column-major, in the kernels' order; of packed elements K counts bytes."""
        return _permuted(b, lambda blocks, depth, pieces: (blocks, ROWS, depth, pieces, UNIT), (0, 2, 3, 1, 4))

    def unpack(self, b: Tensor) -> Tensor:
        """Return the argument of `pack`."""
        return _permuted(b, lambda blocks, depth, pieces: (blocks, depth, pieces, ROWS, UNIT), (0, 3, 1, 2, 4))


def _permuted(b: Tensor, shape: Callable[[int, int, int], tuple[int, ...]], order: tuple[int, ...]) -> Tensor:
    import torch

    k, n = b.shape
    pieces = DEPTH * b.element_size() // UNIT
    rows = b.T.contiguous().view(torch.uint8)
    mixed = rows.reshape(shape(n // ROWS, k // DEPTH, pieces)).permute(order).reshape(rows.shape)
    return mixed.contiguous().view(b.dtype).T

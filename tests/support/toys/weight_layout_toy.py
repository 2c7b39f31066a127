"""Weight layout: a toy, panels of eight columns of B, each with its rows one after the other."""

from __future__ import annotations

from torch import Tensor

from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins.contracts import WeightLayout

COLUMNS = 8  # of a panel


class Panels(WeightLayout):
    """Panels of eight columns follow each other; a panel has eight numbers of its first row, then of its second."""

    def supports(self, problem: Problem) -> Support:
        """Whether B is column-major and its columns fill complete panels."""
        if problem.b.row_major or problem.n % COLUMNS:
            return Support(f"panels want B column-major (-col_b) and N a multiple of {COLUMNS}, not {problem.n}")
        return SUPPORTED

    def pack(self, b: Tensor) -> Tensor:
        """B [K, N], column-major, in panels."""
        k, n = b.shape
        return b.T.reshape(n // COLUMNS, COLUMNS, k).permute(0, 2, 1).reshape(n, k).T

    def unpack(self, b: Tensor) -> Tensor:
        """What `pack` was given."""
        k, n = b.shape
        return b.T.reshape(n // COLUMNS, k, COLUMNS).permute(0, 2, 1).reshape(n, k).T

"""Rows of foreign files that are right and stay as they are, but that nothing here can tune."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from tritongemm.core.errors import UntunableRowsWarning
from tritongemm.core.format_row import DamagedRow

FULL_FLOAT32 = "it multiplies whole float32; here products of float32 are of tf32"


class KeptError(Exception):
    """A row is of a product that is none of ours."""


def warn_of(path: Path, kept: Sequence[tuple[int, int, str]]) -> tuple[DamagedRow, ...]:
    """Warn of such rows of a file, in one line, and return them with whole reasons.

    Args:
        path: of the file.
        kept: number, line and reason of each.
    """
    rows = tuple(
        DamagedRow(row, line, f"{path}: row {row} (line {line}) can't be tuned here: {reason}")
        for row, line, reason in kept
    )
    if rows:
        count = len(rows) - 1
        others = f"; nor can {count} other{'s' * (count > 1)}" if count else ""
        warnings.warn(rows[0].reason + others, UntunableRowsWarning, stacklevel=3)
    return rows

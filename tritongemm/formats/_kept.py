"""Rows of foreign files that are right and stay as they are, but that nothing here can tune."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from tritongemm.core.errors import NewerVersionWarning


class KeptError(Exception):
    """A row is of a product that is none of ours."""


def warn_of(path: Path, kept: Sequence[tuple[int, str]]) -> None:
    """Warn of such rows of a file, in one line.

    Args:
        path: of the file.
        kept: line and reason of each.
    """
    if not kept:
        return
    line, reason = kept[0]
    others = f", and {len(kept) - 1} others," if len(kept) > 1 else ""
    warnings.warn(f"{path}: line {line}{others} can't be tuned here: {reason}", NewerVersionWarning, stacklevel=3)

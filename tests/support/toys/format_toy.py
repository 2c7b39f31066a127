"""Format: a toy, a CSV of sizes whose first line is ``toy,M,N,K``."""

from __future__ import annotations

from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.formats import make_problem
from tritongemm.plugins.contracts import Format


class ToyCsv(Format):
    """Sizes, a line each; the first column is a remark."""

    title = "the toy's CSV, toy,M,N,K"
    suffixes = (".csv",)

    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file begins with the toy's line."""
        return text.startswith("toy,M,N,K\n")

    def read(self, path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
        """A row for each line after the first."""
        rows = []
        for line, values in enumerate(text.splitlines()[1:], start=2):
            try:
                m, n, k = map(int, values.split(",")[1:])
                rows.append(FormatRow(make_problem(defaults, m, n, k), line=line))
            except (ValueError, InputError) as error:
                raise InputError(f"{path}: row {line - 1} (line {line}) M, N, K: {error}") from None
        return rows

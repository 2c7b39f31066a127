"""Format: a toy, a CSV of sizes whose first line is ``toy,M,N,K``."""

from __future__ import annotations

from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import DamagedRow, Defaults, FormatRow, ResultsFile
from tritongemm.formats import make_problem
from tritongemm.plugins.contracts import Format


class ToyCsv(Format):
    """Sizes, a line each; the first column is a remark."""

    title = "the toy's CSV, toy,M,N,K"
    suffixes = (".csv",)

    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file begins with the toy's line."""
        return text.startswith("toy,M,N,K\n")

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """A row for each line after the first."""
        rows, damaged = [], []
        for number, values in enumerate(text.splitlines()[1:], start=1):
            try:
                m, n, k = map(int, values.split(",")[1:])
                rows.append(FormatRow(make_problem(defaults, m, n, k), line=number + 1, number=number))
            except (ValueError, InputError) as error:
                reason = f"{path}: row {number} (line {number + 1}) M, N, K: {error}"
                damaged.append(DamagedRow(number, number + 1, reason))
        return ResultsFile(tuple(rows), tuple(damaged))

"""Sorts out rows of foreign files that are damaged, or right but of products that nothing here can tune."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tritongemm.core.errors import InputError, UntunableRowsWarning
from tritongemm.core.format_row import DamagedRow, FormatRow, ResultsFile

FULL_FLOAT32 = "it multiplies full float32; here products of float32 are of tf32"


class KeptError(Exception):
    """A row is of a product that is not supported."""


class RowFaults:
    """The rows of a file that can't be used, with the reasons."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damaged: list[DamagedRow] = []
        self._kept: list[tuple[int, int, str]] = []

    @contextmanager
    def of_row(self, row: int, line: int, key: str = "") -> Iterator[None]:
        """Record a `KeptError` or `InputError` about a row as the reason why it is not used."""
        try:
            yield
        except KeptError as why:
            self._kept.append((row, line, str(why)))
        except InputError as error:
            reason = " ".join(filter(None, (f"{self._path}: row {row} (line {line})", key, str(error))))
            self._damaged.append(DamagedRow(row, line, reason))

    def beside(self, rows: Iterable[FormatRow]) -> ResultsFile:
        """Return the file with the usable rows; a warning names those of products that can't be tuned."""
        return ResultsFile(tuple(rows), tuple(self._damaged), warn_of(self._path, self._kept))


def warn_of(path: Path, kept: Sequence[tuple[int, int, str]]) -> tuple[DamagedRow, ...]:
    """Warn of such rows of a file, in one line, and return them with full reasons."""
    rows = tuple(
        DamagedRow(row, line, f"{path}: row {row} (line {line}) can't be tuned here: {reason}")
        for row, line, reason in kept
    )
    if rows:
        count = len(rows) - 1
        others = f"; nor can {count} other{'s' * (count > 1)}" if count else ""
        warnings.warn(rows[0].reason + others, UntunableRowsWarning, stacklevel=3)
    return rows

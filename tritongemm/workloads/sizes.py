"""Stage: CLI values and files → Problems. Each module of interop/ reads one format and says which files are its own."""

from __future__ import annotations

from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.formats import Defaults, FormatRow, problem_of, text_of
from tritongemm.plugins import _modules as registry

__all__ = ["Defaults", "FormatRow", "from_file", "from_options"]


def from_options(m: int, n: int, k: int, defaults: Defaults) -> list[FormatRow]:
    """The one size of the command line.

    Raises:
        InputError: a size or dtype that can't be.
    """
    return [FormatRow(problem_of(defaults, m, n, k))]


def from_file(path: Path, defaults: Defaults) -> list[FormatRow]:
    """The rows of a file in any format of interop/, in its order.

    Raises:
        InputError: no such file, no format claims it, or a row is wrong; names file, row, line and field.
        UnavailableError: its format needs a package that is missing.
    """
    text = text_of(path)
    readers = [registry.load("formats", name) for name in registry.names("formats")]
    for reader in readers:
        if reader.recognises(path, text):
            rows: list[FormatRow] = reader.read(path, text, defaults)
            return rows
    raise InputError(f"{path} is in no known format; there are: {'; '.join(r.FORMAT for r in readers)}")

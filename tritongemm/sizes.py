"""Stage: CLI values and files → Problems. Each module of interop/ reads one format and says which files are its own."""

from __future__ import annotations

from pathlib import Path

from tritongemm import registry
from tritongemm.errors import InputError
from tritongemm.interop import Defaults, Row, text_of

__all__ = ["Defaults", "Row", "from_file", "from_options"]


def from_options(m: int, n: int, k: int, defaults: Defaults) -> list[Row]:
    """The one size of the command line.

    Raises:
        InputError: a size or dtype that can't be.
    """
    return [Row(defaults.problem(m, n, k))]


def from_file(path: Path, defaults: Defaults) -> list[Row]:
    """The rows of a file in any format of interop/, in its order.

    Raises:
        InputError: no such file, no format claims it, or a row is wrong; names file, row, line and field.
        UnavailableError: its format needs a package that is missing.
    """
    text = text_of(path)
    readers = [registry.load("interop", name) for name in registry.names("interop")]
    for reader in readers:
        if reader.recognises(path, text):
            rows: list[Row] = reader.read(path, text, defaults)
            return rows
    raise InputError(f"{path} is in no known format; there are: {'; '.join(r.FORMAT for r in readers)}")

"""Reads what `load` is given: a results file, a library or records; anything else is refused by name."""

import os
from collections.abc import Iterable
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.serving.record_table import read_rows
from tritongemm.serving.source_row import SourceRow


def read_source(source: str | os.PathLike[str] | Iterable[Record], family: str = "") -> list[SourceRow]:
    """Return the tuned rows of a results file, or the records given.

    Raises:
        InputError: the file can't be read, is no regular file, or holds no tuned result.
        TypeError: neither a path nor records.
    """
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not isinstance(path, str):
            raise TypeError(f"a results file is named by text, not by {type(path).__name__}: {path!r:.100}")
        _require_regular(path)
        return read_rows(Path(path), family=family)
    if isinstance(source, bytes | bytearray) or not isinstance(source, Iterable):
        raise TypeError(f"load takes the path of a results file, or records, not {type(source).__name__}")
    records = list(source)
    if others := [r for r in records if not isinstance(r, Record)]:
        raise TypeError(f"load takes records; one of those given is a {type(others[0]).__name__}")
    return [SourceRow(record) for record in records]


def _require_regular(path: str) -> None:
    """Refuse what is there but no file with an end, such as a pipe or a device: reading it might never return."""
    if "\0" in path:
        raise InputError(f"{path!r:.100} can't be the name of a file")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"{Path(path)} is a pipe, a socket or a device; name a results file")

"""Reads what `load` is given: a results file, a library or records; anything else is refused by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tritongemm.core.errors import DamagedFileWarning, InputError
from tritongemm.core.record import Record
from tritongemm.serving.source_row import SourceRow

if TYPE_CHECKING:
    from tritongemm.export.library.storage import KernelLibrary

_OF_LOAD = 4  # the level of the stack whose call a warning names
_MOST_NAMED = 10  # entries that a warning names


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
        return _read_rows(Path(path), family)
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


def _read_rows(path: Path, family: str) -> list[SourceRow]:
    """Return the rows of a file of any known format that hold a tuned result. A warning names damaged rows.

    `family` is what another tool calls what its file is of; "" where only the file says.
    """
    from tritongemm.formats import Defaults, format_of, read_text
    from tritongemm.plugins.contracts import TunerFormat

    text = read_text(path)
    format_ = format_of(path, text)
    table = format_ if isinstance(format_, TunerFormat) else None
    defaults = Defaults(family=family) if table and family in table.families else Defaults()
    found = format_.read_usable(path, text, defaults)
    rows = [
        SourceRow(row.record, str(path), row.where(str(path)), bool(table and table.padded_m))
        for row in found.rows
        if row.record is not None
    ]
    if not rows:
        found.require_undamaged()
        foreign = next((f"; row {row.number} names {row.foreign}" for row in found.rows if row.foreign), "")
        raise InputError(f"{path}: holds sizes but no tuned result{foreign}; tune it first")
    if found.damaged:
        warnings.warn(found.describe_damaged(), DamagedFileWarning, stacklevel=_OF_LOAD)
    return rows


def read_library(path: Path) -> tuple[KernelLibrary, list[SourceRow]]:
    """Return a library and its usable entries. A warning names the others, whose sizes have no row.

    Raises:
        InputError: it can't be read, or holds no usable entry.
    """
    from tritongemm.export.library.storage import StoredCode, open_library  # whose import takes longer than the rest

    library = open_library(path)
    if library.damaged:
        more = [f"and {len(library.damaged) - _MOST_NAMED} more"] if len(library.damaged) > _MOST_NAMED else []
        listed = "; ".join([*map(str, library.damaged[:_MOST_NAMED]), *more])
        if not library.entries:
            raise InputError(f"{path}: none of its entries can be used: {listed}; build it again")
        text = f"{path}: {len(library.damaged)} entries are not used: {listed}"
        warnings.warn(text, DamagedFileWarning, stacklevel=_OF_LOAD)
    if not library.entries:
        raise InputError(f"{path}: the library is empty")
    rows = []
    for entry in library.entries:
        code = None if entry.kernel is None else StoredCode(library, entry.kernel)
        rows.append(SourceRow(entry.record, str(path), f"{path}: {entry.name}", code=code))
    return library, rows

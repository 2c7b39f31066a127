"""The rows of a library of tuned kernels, each with its code."""

import warnings
from pathlib import Path

from tritongemm.core.errors import DamagedFileWarning, InputError
from tritongemm.export.library.storage import KernelLibrary, StoredCode, open_library
from tritongemm.serving.source_row import SourceRow

_MOST_NAMED = 10  # entries that a warning names


def read_library(path: Path, stacklevel: int = 4) -> tuple[KernelLibrary, list[SourceRow]]:
    """Return a library and its usable entries. A warning names the others, whose sizes have no row.

    Raises:
        InputError: it can't be read, or holds no usable entry.
    """
    library = open_library(path)
    if library.damaged:
        more = [f"and {len(library.damaged) - _MOST_NAMED} more"] if len(library.damaged) > _MOST_NAMED else []
        listed = "; ".join([*map(str, library.damaged[:_MOST_NAMED]), *more])
        if not library.entries:
            raise InputError(f"{path}: none of its entries can be used: {listed}; build it again")
        text = f"{path}: {len(library.damaged)} entries are not used: {listed}"
        warnings.warn(text, DamagedFileWarning, stacklevel=stacklevel)
    if not library.entries:
        raise InputError(f"{path}: the library is empty")
    rows = []
    for entry in library.entries:
        code = None if entry.kernel is None else StoredCode(library, entry.kernel)
        rows.append(SourceRow(entry.record, str(path), f"{path}: {entry.name}", code=code))
    return library, rows

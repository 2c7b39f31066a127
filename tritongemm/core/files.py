"""Files that are replaced as a whole: a reader sees the old contents or the new, never a part."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from tritongemm.core.errors import OutputError


def atomic_write(path: Path, text: str) -> None:
    """Replace a file's contents at once; a reader sees the old text or the new.

    Raises:
        OutputError: it can't be written, e.g. because the disk is full; the old text is still there.
    """
    fresh = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except OSError as error:
        if fresh:
            Path(fresh).unlink(missing_ok=True)
        raise OutputError(
            f"{path} can't be written: {error.strerror}; make room and run the same command again, or choose another "
            "file with -o"
        ) from error


def replace_file(path: Path, text: str) -> None:
    """Put a new file in the place of an old one, whose mode it keeps; readers see the one or the other.

    Raises:
        OSError: the old one is still there.
    """
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        with fresh.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if path.exists():
            shutil.copymode(path, fresh)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not every file system syncs folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

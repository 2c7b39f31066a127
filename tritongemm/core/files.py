"""Text files that are replaced as a whole: a reader sees the old text or the new, never a part."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from tritongemm.core.errors import OutputError

_RANDOM_BYTES = 4  # in the name of a text that is being written

ADVICE = "make room and run the same command again, or choose another file with -o"
TEMPORARY = "tritongemm-"  # what the names of temporary folders begin with
TEMPORARY_ADVICE = "make room there, or name another folder for temporary files in TMPDIR"


def is_temporary(path: Path) -> bool:
    """Whether a path is a temporary folder of ours, or lies in one."""
    folder = Path(tempfile.gettempdir())
    return any(each.parent == folder and each.name.startswith(TEMPORARY) for each in (path, *path.parents))


def atomic_write(path: Path, text: str, advice: str = ADVICE) -> None:
    """Replace a file's text at once and wait until the disk has it; the file's mode is kept.

    Args:
        path: the file; its folder is made where it is missing.
        text: written as UTF-8.
        advice: what an error tells the user to do.

    Raises:
        OutputError: the file can't be written, e.g. because the disk is full; the old text is still there.
    """
    # The name is unique, so that two processes that write the same file do not write into each other's text.
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(_RANDOM_BYTES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if path.exists():
            shutil.copymode(path, fresh)
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        told = TEMPORARY_ADVICE if is_temporary(path) else advice
        raise OutputError(f"{path} can't be written: {error.strerror}; {told}") from error
    with suppress(OSError):  # not every file system syncs folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sweep(path: Path) -> None:
    """Delete the unfinished texts of a file that processes left when they were killed while they replaced it.

    Args:
        path: the file; the caller holds its lock, so that nobody else is writing it now.
    """
    unfinished = re.compile(rf"\.{re.escape(path.name)}\.\d+\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
    with suppress(OSError):
        for found in path.parent.iterdir():
            if unfinished.fullmatch(found.name):
                found.unlink(missing_ok=True)

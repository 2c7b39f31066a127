"""Locks on files and folders that one process at a time may write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tritongemm.core.errors import OutputError

_LOCK_SECONDS = 60.0


@contextmanager
def held(path: Path, advice: str) -> Iterator[None]:
    """Keep other processes of this package from writing a file or folder, which need not exist yet.

    Links to one place, and names such as ``.``, share a lock, which is a file beside it.

    Args:
        path: the file or folder.
        advice: the advice in an error's message.

    Raises:
        OutputError: it can't be written, or another process holds it for a minute.
    """
    try:
        real = Path(os.path.realpath(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(real.parent / f".{real.name}.lock")
        lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout:
        raise OutputError(f"{path} can't be written: another process holds {lock.lock_file}; {advice}") from None
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}; {advice}") from error
    try:
        yield
    finally:
        lock.release()

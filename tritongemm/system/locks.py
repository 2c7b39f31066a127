"""Locks files by the operating system, so that a lock ends with its process however it dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tritongemm.core.errors import OutputError
from tritongemm.system.files import open_regular

_LOCK_SECONDS = 60.0  # another process writes for milliseconds
_POLL_SECONDS = 0.05


def held(path: Path, advice: str) -> AbstractContextManager[None]:
    """Lock a file or folder, which need not exist yet, against other processes of this package, for up to a minute.

    Links to one place, and names such as ``.``, share a lock, which is a file beside it.
    """
    try:
        real = Path(os.path.realpath(path))
        real.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}; {advice}") from error
    lock = real.parent / f".{real.name}.lock"
    refusal = f"{path} can't be written: another process holds {lock}; {advice}"
    return locked(lock, refusal, advice, _LOCK_SECONDS)


@contextmanager
def locked(lock: Path, refusal: str, advice: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock file, which is made where it is missing; its text is not touched.

    If another process holds it for longer than `seconds`, the error is `refusal`; any other error ends with `advice`.
    """
    try:
        file = os.fdopen(open_regular(lock, os.O_RDWR | os.O_CREAT), "rb")
    except OSError as error:
        raise OutputError(f"{lock} can't be written: {error.strerror}; {advice}") from error
    with file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OutputError(refusal) from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise OutputError(f"{lock} can't be locked: {error.strerror}; {advice}") from error
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # Closing alone would leave it to a child that was forked meanwhile.

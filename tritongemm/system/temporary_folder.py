"""Makes temporary folders, each locked while its process lives, so that those of dead processes can be removed.

A folder is `tritongemm-<eight characters>`, accessible to its user only; it contains the files, and a lock file. The
lock is the operating system's: it ends with the process however that dies, and works across containers that share the
folder.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from tritongemm.core.errors import OutputError

MEMORY = "/dev/shm"  # where Linux keeps files in memory
TEMPORARY_ADVICE = "make room there, or name another folder for temporary files in TMPDIR"
_PREFIX = "tritongemm-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile names folders
_LOCK, _FILES = "lock", "files"  # what is in a folder


class TemporaryFolder:
    """A temporary folder, which is removed when it is closed, is not used any more, or the process ends."""

    def __init__(self, place: str | None = None) -> None:
        try:
            folder, lock = _make(place)
        except OSError as error:
            where = f" in {place}" if place else ""
            raise OutputError(
                f"no temporary folder can be made{where}: {error.strerror}; make room, or name another place in TMPDIR"
            ) from error
        self.path = folder / _FILES
        self._remove = weakref.finalize(self, _remove, folder, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._remove()


def is_temporary(path: Path) -> bool:
    """Return whether a path is a temporary folder of this package, or is in one."""
    place = Path(tempfile.gettempdir())
    return any(each.parent == place and each.name.startswith(_PREFIX) for each in (path, *path.parents))


def sweep(*places: str) -> None:
    """Remove the temporary folders that dead processes of this user left."""
    with suppress(OSError):  # there is no usable place
        for place in places or {tempfile.gettempdir(), MEMORY}:
            for folder in _left_in(place):
                with suppress(OSError):
                    _remove_dead(folder)


def _make(place: str | None) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # a sweep took the folder, which had no lock yet, for a dead process's
            continue
        with suppress(OSError):  # a file system without locks: the folder can't be locked, and is never removed
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            (folder / _FILES).mkdir()
            return folder, lock
        except FileNotFoundError:  # the same, before the lock was taken
            os.close(lock)
        except OSError:
            _remove(folder, lock)
            raise


def _remove(folder: Path, lock: int) -> None:
    """Remove a folder; the lock goes last, so that a sweep finds what a kill leaves of it."""
    shutil.rmtree(folder / _FILES, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _left_in(place: str) -> list[Path]:
    """Return the folders of this package's name in a place, whether their processes live or not."""
    try:
        with os.scandir(place) as entries:
            return [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return []


def _remove_dead(folder: Path) -> None:
    """Remove a folder of this user, closed to others, whose lock is free, or which is empty."""
    found = folder.lstat()
    if (stat.S_ISDIR(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode)) != (True, os.getuid(), 0o700):
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # its process died before it made the lock, or after it removed it
        folder.rmdir()
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    _remove(folder, lock)

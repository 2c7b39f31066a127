"""Writes files, each replaced at once, and only if a file of the same kind may be there.

A reader of a file that is being replaced sees the old text or the new, never a part. Anything other than a regular file
(a link, a device, a pipe, a folder) is neither replaced nor opened.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tritongemm.core.errors import OutputError
from tritongemm.system.temporary_folder import TEMPORARY_ADVICE, is_temporary

_RANDOM_BYTES = 4  # in the name of a text that is being written
_UNFINISHED = rf"\.\d+\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}"
_START_BYTES = 1 << 12  # how much of a file is read to find its kind

ADVICE = "make room and run the same command again, or choose another file with -o"

_OTHER_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _mode(path: Path) -> int | None:
    """Return the mode of a file, with its kind; None where there is none. A link is not followed."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _fault(mode: int) -> str:
    """Return why a file of this mode is not replaced; "" where it may be."""
    other = next((words for holds, words in _OTHER_KINDS if holds(mode)), "")
    if other:
        return f"is {other}, not a file that can be replaced"
    return "" if mode & 0o222 else "is read-only, so it is not replaced"


def _unfinished(path: Path) -> Path:
    """Return the path of a file's new text before it takes the file's place.

    The name is unique, so that two processes that write the same file do not write into each other's text.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(_RANDOM_BYTES)}")


def _create(path: Path) -> int:
    """Create a file where nothing is yet, not even a link; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def are_one(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one place, there or not."""
    return os.path.realpath(one) == os.path.realpath(other)


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor, without following a link or waiting for another process."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")


def read_regular(path: Path, size: int = -1) -> bytes:
    """Return the first bytes of a regular file, or all of them if no size is given."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(size)


def check_place(path: Path, is_kind: Callable[[bytes], bool], what: str, advice: str) -> None:
    """Refuse a path that can't be written, or that holds something else, before work starts.

    The file need not exist; its folder is created. `is_kind` says whether a file with this beginning is of the kind to
    be written, which `what` names, e.g. ``a journal of tritongemm``; `advice` ends the error's message.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode(path)
        fault = "" if mode is None else _fault(mode)
        if mode is not None and not fault:
            with suppress(FileNotFoundError):  # another process may have removed it just now
                fault = "" if is_kind(read_regular(path, _START_BYTES)) else f"is not {what}"
        if not fault:
            new = _unfinished(path)
            os.close(_create(new))
            new.unlink(missing_ok=True)  # it may have been swept already
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}; {advice}") from error
    except ValueError as error:
        raise OutputError(f"{str(path)!r} is a name that no file can have: {error}; {advice}") from error
    if fault:
        raise OutputError(f"{path} {fault}; {advice}")


def atomic_write(path: Path, text: str | bytes, advice: str = ADVICE) -> None:
    """Replace a file's text at once and wait until the disk has it; the file's mode is kept.

    If that fails, which raises an OutputError, what was there before still is.
    """
    new = _unfinished(path)
    try:
        # A temporary folder that is gone stays gone: after Ctrl-C a thread that goes on would make it again.
        path.parent.mkdir(parents=not is_temporary(path), exist_ok=True)
        mode = _mode(path)
        if mode is not None and (fault := _fault(mode)):
            raise OutputError(f"{path} {fault}; {advice}")
        with os.fdopen(_create(new), "wb") as out:
            out.write(text.encode() if isinstance(text, str) else text)
            out.flush()
            os.fsync(out.fileno())
        if mode is not None:
            new.chmod(stat.S_IMODE(mode))
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        remedy = TEMPORARY_ADVICE if is_temporary(path) else advice
        raise OutputError(f"{path} can't be written: {error.strerror}; {remedy}") from error
    with suppress(OSError):  # not every file system syncs folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def keep_edited(path: Path, text: bytes) -> Path:
    """Write a file's text to a new file beside it, named with ``.edited``, and a number if that name is taken."""
    name = path.name + ".edited"
    kept, number = path.with_name(name), 1
    while True:
        try:
            descriptor = _create(kept)
            break
        except FileExistsError:
            number += 1
            kept = path.with_name(f"{name}.{number}")
    with os.fdopen(descriptor, "wb") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return kept


def sweep(folder: Path, name: str | None = None) -> None:
    """Delete unfinished texts that processes left in a folder when they were killed while replacing a file.

    The caller holds the lock of the file of that name, or of all files, so that no other process writes them now.
    """
    unfinished = re.compile((r"\..+" if name is None else rf"\.{re.escape(name)}") + _UNFINISHED)
    with suppress(OSError):
        for found in folder.iterdir():
            if unfinished.fullmatch(found.name):
                found.unlink(missing_ok=True)

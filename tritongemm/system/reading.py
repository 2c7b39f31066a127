"""Reads files that users name, with limits on size and on the time to wait for a pipe.

Objects of JSON files must not repeat a key.
"""

import os
import select
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tritongemm.core.errors import InputError
from tritongemm.system.temporary_folder import TEMPORARY_ADVICE

MOST_BYTES = 256 << 20
WRITER_SECONDS = 5.0  # after which a pipe without a writer is given up
SILENCE_SECONDS = 60.0  # for which a pipe with a writer may be silent
_PIECE_BYTES = 1 << 20
_LOOK_SECONDS = 0.1  # between two checks whether a pipe has a writer


class RepeatedKeyError(ValueError):
    """An object of a JSON file has a key several times."""

    def __init__(self, key: str) -> None:
        super().__init__(f"a JSON object has the key {key!r} several times")
        self.key = key


def keys_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's values by key, as an ``object_pairs_hook`` of json that refuses a key given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(next(key for key, count in counts.items() if count > 1))
    return values


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file or a pipe, such as ``<(command)`` or ``/dev/stdin``.

    What can't be read, has more than `MOST_BYTES`, or is a silent pipe raises an InputError.
    """
    with _named_faults(path):
        status = os.stat(path)
        _check_size(path, status.st_size)
        descriptor = _open(path, status.st_mode)
        try:
            return _read_to_end(path, descriptor, is_pipe=stat.S_ISFIFO(status.st_mode))
        finally:
            os.close(descriptor)


def decode(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file or a pipe as it is; raises as `read_bytes`, and where it is not in UTF-8."""
    try:
        return read_bytes(path).decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: byte {error.start} is not UTF-8; save it as UTF-8") from None


def open_bytes(path: Path) -> BinaryIO:
    """Open a file of any size at its beginning; a pipe is first copied to an unnamed temporary file."""
    with _named_faults(path):
        mode = os.stat(path).st_mode
        descriptor = _open(path, mode)
        if not stat.S_ISFIFO(mode):
            return os.fdopen(descriptor, "rb")
        try:
            return _kept(path, _pieces(path, descriptor, is_pipe=True))
        finally:
            os.close(descriptor)


def _kept(path: Path, pieces: Iterator[bytes]) -> BinaryIO:
    """Return an unnamed temporary file with the text of a pipe, open at its beginning."""
    try:
        kept: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        for piece in pieces:
            kept.write(piece)
        kept.seek(0)
    except OSError as error:
        raise InputError(f"{path}: what it gives can't be kept: {error.strerror}; {TEMPORARY_ADVICE}") from None
    return kept


@contextmanager
def _named_faults(path: Path) -> Iterator[None]:
    """Name a file in errors of the operating system."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise InputError(f"{path} can't be read: {error}") from None


def _open(path: Path, mode: int) -> int:
    """Return the descriptor of a file or a pipe, which is not waited for."""
    if stat.S_ISDIR(mode):
        raise InputError(f"{path} is a folder; name a file in it")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # opening some devices has an effect
        raise InputError(f"{path} is a device or a socket; name a file")
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)


def _read_to_end(path: Path, descriptor: int, is_pipe: bool) -> bytes:
    pieces, size = list[bytes](), 0
    for piece in _pieces(path, descriptor, is_pipe):
        pieces.append(piece)
        size += len(piece)
        _check_size(path, size)
    return b"".join(pieces)


def _pieces(path: Path, descriptor: int, is_pipe: bool) -> Iterator[bytes]:
    may_wait = is_pipe
    while piece := _next_piece(path, descriptor, may_wait):
        may_wait = False
        yield piece


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise InputError(f"{path} has more than {MOST_BYTES >> 20} MiB; name a file of sizes or results")


def _next_piece(path: Path, descriptor: int, may_wait: bool) -> bytes:
    """Return the next piece, or nothing at the end."""
    started = time.monotonic()
    while True:
        try:
            piece = os.read(descriptor, _PIECE_BYTES)
            if piece or not may_wait:
                return piece
        except BlockingIOError:  # a writer holds the pipe open
            may_wait = False
        limit = WRITER_SECONDS if may_wait else SILENCE_SECONDS
        if time.monotonic() - started > limit:
            raise InputError(f"{path} is a pipe, and nothing came out of it in {limit:g} s")
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        if any(event == select.POLLHUP for _, event in waiting.poll(_LOOK_SECONDS * 1000)):
            return b""  # its writers have closed it

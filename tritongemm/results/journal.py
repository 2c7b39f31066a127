"""Appends JSON lines to a file, safe from kill -9, a full disk and damage to the file.

Each line ends with a checksum of its own bytes: ``{"record": {…}, "crc32": 1234567890}``. A line that is not as it was
written is passed over and costs what it held.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from tritongemm.core.errors import InputError, NewerFileError, OutputError
from tritongemm.core.problem import Problem
from tritongemm.results import schema
from tritongemm.results.schema import Line
from tritongemm.system import files

HEADER = b'{"header": '  # the beginning of the first line
_CHECKSUM = b', "crc32": '  # the separator between the bytes that are summed and their sum


class Journal:
    """A journal, open for appending by one thread at a time; what is behind `size` bytes, a torn line, is cut off."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._size, self._fd = path, size, -1
        try:
            self._fd = files.open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.close()
            raise OutputError(f"{path} can't be written: {error.strerror}; choose another file with -o") from error

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write a line for each entry, by a single call, and wait until the disk has them."""
        data = b"".join(map(encode, entries))
        if not data:
            return
        try:
            # Longer only where an earlier failure could not be undone at once.
            if os.fstat(self._fd).st_size > self._size:
                os.ftruncate(self._fd, self._size)
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise OutputError(
                f"{self.path} can't be written: {error.strerror}; what was there before is safe. Make room and run the "
                "same command again"
            ) from error
        self._size += len(data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode(entry: dict[str, Any]) -> bytes:
    """Return the line of an entry, with its checksum and its end."""
    summed = json.dumps(entry).encode().removesuffix(b"}")
    return summed + _CHECKSUM + b"%d}\n" % crc32(summed)


def resume(path: Path, header: Mapping[str, Any]) -> tuple[Journal, list[Line]]:
    """Open a journal, with its lines if it has this header; otherwise it is set aside, and begins anew."""
    known = read(path)
    first = known.lines.get(1)
    if first is not None and first.kind == "header" and first.value == header:
        return Journal(path, known.size), list(known.lines.values())
    if known.size:
        try:
            os.replace(path, path.with_name(f"{path.name}.old"))
        except OSError as error:
            raise OutputError(f"{path} can't be set aside: {error.strerror}; move it away") from error
    begun = Journal(path, 0)
    begun.append([{"header": dict(header)}])
    return begun, []


def is_journal(start: bytes) -> bool:
    """Return whether a file begins as a journal, or is the beginning of one."""
    return start.startswith(HEADER[: len(start)])


@dataclass(frozen=True)
class JournalLines:
    """The lines of a journal."""

    lines: dict[int, Line]  # what can be used, by number of the line, from 1
    damaged: dict[int, str]  # why other lines can't be read, by number
    size: int  # bytes of the complete lines; the rest is a line that a kill cut


def read(path: Path) -> JournalLines:
    """Return the complete lines of a journal; an absent journal has none."""
    try:
        data = files.read_regular(path)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise OutputError(f"{path} can't be read: {error.strerror}; choose another file with -o") from error
    if not is_journal(data):
        raise OutputError(f"{path} is not a journal of tritongemm; move it away, or choose another file with -o")
    return parse(path, data)


def parse(path: Path, data: bytes) -> JournalLines:
    """Return the complete lines of a journal's bytes; raises NewerFileError where a newer version wrote them."""
    size = data.rfind(b"\n") + 1
    found: dict[int, Line] = {}
    damaged: dict[int, str] = {}
    for number, line in enumerate(_parsed(path, data[:size].split(b"\n")[:-1]), start=1):
        if isinstance(line, Line):
            found[number] = line
        else:
            damaged[number] = line
    return JournalLines(found, damaged, size)


def _parsed(path: Path, lines: Iterable[bytes]) -> Iterator[Line | str]:
    """Yield each line's value, or why it can't be read."""
    problems: dict[bytes, Problem] = {}
    for line in lines:
        try:
            yield schema.read_line(path, _without_checksum(line), problems)
        except NewerFileError:
            raise
        # Damage makes values of any type out of any other, and JSON that is nested deeper than Python reads.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
            yield f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _without_checksum(line: bytes) -> bytes:
    """Return a line's JSON without its checksum, which must agree."""
    summed, _, number = line.rpartition(_CHECKSUM)
    if number != b"%d}" % crc32(summed):
        raise InputError("its checksum does not agree")
    return summed + b"}"

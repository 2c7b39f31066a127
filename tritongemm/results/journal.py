"""A file of JSON lines that keeps what it took, through kill -9 and a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError, OutputError
from tritongemm.results import schema
from tritongemm.results.schema import Line

HEADER = b'{"header": '  # what the first line begins with


class Journal:
    """A journal, open for appending. One thread at a time.

    Args:
        path: the file; made when absent.
        size: bytes of it to keep; the rest is a line that a kill tore.

    Raises:
        OutputError: it can't be written.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._size, self._fd = path, size, -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.close()
            raise OutputError(f"{path} can't be written: {error.strerror}; choose another file with -o") from error

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write a line for each entry, by a single call, and wait until the disk has them.

        Raises:
            OutputError: the disk has them not; the journal is as it was before.
        """
        data = "".join(json.dumps(e) + "\n" for e in entries).encode()
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


def read(path: Path) -> tuple[list[bytes], int]:
    """The whole lines of a journal, without their ends, and their size in bytes; an absent journal has none.

    Raises:
        OutputError: the journal can't be read, or the file is another program's.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise OutputError(f"{path} can't be read: {error.strerror}; choose another file with -o") from error
    if not data.startswith(HEADER[: len(data)]):
        raise OutputError(f"{path} is not a journal of tritongemm; move it away, or choose another file with -o")
    size = data.rfind(b"\n") + 1
    return data[:size].split(b"\n")[:-1], size


def parsed(path: Path, lines: Iterable[bytes], strict: bool) -> Iterator[Line]:
    """What the lines say.

    Args:
        path: for messages.
        lines: of `read`.
        strict: complain about a damaged line rather than pass over it.

    Raises:
        OutputError: a line is damaged; says which.
    """
    number_of_schema = 1
    for number, line in enumerate(lines, start=1):
        try:
            found = schema.read_line(json.loads(line), number_of_schema)
            if found.kind == "header":
                number_of_schema = schema.schema_of(found.value)
        except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
            if strict:
                what = str(error) or "of no known kind"
                raise OutputError(
                    f"{path}: line {number} is damaged ({what}); delete that line, or use --no-resume"
                ) from error
            continue
        yield found

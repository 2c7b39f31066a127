"""A log as pieces of text: of any size, as it is or compressed, without the marks of encodings, terminals and
containers.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from tritongemm.core.errors import InputError
from tritongemm.formats import plain_text
from tritongemm.system.reading import MOST_BYTES, open_bytes

_BEGINNING = '{"log":'  # plain text, so that a log of anything else is passed over quickly
_LINE = re.compile(r'^\{"log":.*\n?', re.MULTILINE)


def unwrapped(piece: str) -> str:
    """Return the text with each of Docker's lines replaced by what it holds; other lines, and damaged ones, stay."""
    return _LINE.sub(_text, piece) if _BEGINNING in piece else piece


def _text(line: re.Match[str]) -> str:
    try:
        text = json.loads(line[0])["log"]
    except (ValueError, RecursionError):
        return line[0]
    return text.encode(errors="replace").decode() if isinstance(text, str) else line[0]


_PIECE = 16 << 20  # characters of a piece, which is extended to the end of its last line
_LONGEST_LINE = 16 << 20  # characters, after which a line counts as cut
_START = 1 << 12  # bytes that decide how a file is encoded
_COMPRESSED: tuple[tuple[bytes, Callable[[BinaryIO], object]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")  # terminal codes that colour text, or erase a line


class LogFile:
    """A file of any size; one that grows meanwhile ends where it ended when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_bytes(path)
        self.size = self._file.seek(0, io.SEEK_END)  # in bytes, compressed as it is

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the contents; compressed or not, a log has the same."""
        found = hashlib.sha256()
        with self._opened() as file:
            while data := file.read(1 << 20):
                found.update(data)
        return found.hexdigest()

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of complete lines; bytes of other programs that are no text are skipped."""
        with self._opened() as file:
            start = file.peek(_START)[:_START]
            # UTF-16 has a mark and zeros, as PowerShell writes logs.
            wide = start.startswith((b"\xff\xfe", b"\xfe\xff")) and 3 * start.count(0) > len(start)
            encoding = "utf-16" if wide else "utf-8"
            text = io.TextIOWrapper(cast("BinaryIO", file), encoding, "replace", newline="\n")
            while piece := text.read(_PIECE):
                piece += text.readline(_LONGEST_LINE)
                piece = unwrapped(plain_text(piece))
                yield _COLOURS.sub("", piece) if "\x1b" in piece else piece

    def text(self) -> str:
        """Return the text in one piece."""
        found, size = list[str](), 0
        for piece in self.pieces():
            size += len(piece)
            if size > MOST_BYTES:
                raise InputError(
                    f"{self.path} has more than {MOST_BYTES >> 20} MiB, and no line of a log that is known"
                )
            found.append(piece)
        return "".join(found)

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        """Open the contents from their beginning, decompressed; an error names the file."""
        self._file.seek(0)
        file = io.BufferedReader(_Beginning(self._file, self.size))
        start = file.peek(_START)
        if start.startswith(_ZSTANDARD):
            raise InputError(f"{self.path} is compressed by zstd; name <(zstd -dc {self.path})")
        opener = next((opener for magic, opener in _COMPRESSED if start.startswith(magic)), None)
        try:
            yield io.BufferedReader(cast("io.RawIOBase", opener(cast("BinaryIO", file)) if opener else file))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise InputError(f"{self.path} is compressed, and cut or damaged: {error}") from None
        except OSError as error:
            raise InputError(f"{self.path} can't be read: {error.strerror or error}") from None


class _Beginning(io.RawIOBase):
    """The first bytes of a file, however many follow."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._file.read(min(len(memoryview(buffer)), self._left))
        memoryview(buffer)[: len(data)] = data
        self._left -= len(data)
        return len(data)

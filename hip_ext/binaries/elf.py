"""Reads just enough of ELF64 for code objects, header, sections, symbols and notes, and the bundles that hold them."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from tritongemm.core.errors import InputError

_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL_BYTES = 24
_SYMTAB, _NOTE, _NOBITS = 2, 7, 8


class Section(NamedTuple):
    """The place of a section: `size` bytes at `offset` unless its kind is NOBITS."""

    kind: int
    offset: int
    size: int
    link: int


class Elf:
    """A parsed ELF file."""

    def __init__(self, code: bytes) -> None:
        if code[:4] != b"\x7fELF":
            raise InputError(f"code object: not an ELF file, it starts with {bytes(code[:16])!r}")
        if len(code) < 64 or code[4:6] != b"\x02\x01":
            raise InputError(f"code object: {len(code)} bytes of ELF, not a complete little-endian 64-bit header")
        self._code, self.abi_version = code, code[8]
        header = _HEADER.unpack_from(code, 16)
        _, self.machine, _, _, segments, table, self.flags, _, segment, segment_count, entry, count, names = header
        if entry != _SECTION.size or names >= count:
            raise InputError(f"code object: no usable section table ({count} sections of {entry} bytes)")
        self._check("section table", table, count * entry)
        self._check("segment table", segments, segment_count * segment)
        rows = [_SECTION.unpack_from(code, table + index * entry) for index in range(count)]
        self._by_index = [Section(row[1], row[4], row[5], row[6]) for row in rows]
        strings = self._data("section names", self._by_index[names])
        self.sections = {}
        for row, section in zip(rows, self._by_index, strict=True):
            name = _text(strings, row[0])
            if section.kind != _NOBITS:
                self._check(name or "section", section.offset, section.size)
            self.sections[name] = section

    def section(self, name: str) -> bytes:
        """Return the contents of a section."""
        if name not in self.sections:
            raise InputError(f"code object: it has no section {name}")
        return self._data(name, self.sections[name])

    def symbol_names(self) -> list[str]:
        """Return the names of the symbol table's entries, by index."""
        table = next((s for s in self._by_index if s.kind == _SYMTAB), None)
        if table is None or table.link >= len(self._by_index):
            raise InputError("code object: it has no symbol table")
        strings, data = self._data("strings", self._by_index[table.link]), self._data("symbols", table)
        starts = (int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), _SYMBOL_BYTES))
        return [_text(strings, start) for start in starts]

    def notes(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (owner, type, contents) of every note."""
        for section in self._by_index:
            data, at = self._data("note", section) if section.kind == _NOTE else b"", 0
            while at + 12 <= len(data):
                name_bytes, size, kind = struct.unpack_from("<III", data, at)
                body = at + 12 + _aligned(name_bytes)
                if body + size > len(data):
                    raise InputError(f"code object: truncated note of {size} bytes")
                yield (
                    data[at + 12 : at + 12 + name_bytes].rstrip(b"\0").decode(errors="replace"),
                    kind,
                    data[body : body + size],
                )
                at = body + _aligned(size)

    def _data(self, name: str, section: Section) -> bytes:
        if section.kind == _NOBITS:
            return b""
        self._check(name, section.offset, section.size)
        return self._code[section.offset : section.offset + section.size]

    def _check(self, name: str, offset: int, size: int) -> None:
        if offset + size > len(self._code):
            raise InputError(
                f"code object: truncated: {name} ends at byte {offset + size}, the file at {len(self._code)}"
            )


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.find(b"\0", start)].decode(errors="replace")


def _aligned(size: int) -> int:
    return (size + 3) & ~3


_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def device_code(library: bytes, arch: str) -> bytes:
    """Return an architecture's code object of a shared library or bundle; an InputError if it has none."""
    bundle = library if library.startswith(_MAGIC) else Elf(library).section(".hip_fatbin")
    if not bundle.startswith(_MAGIC):
        raise InputError(f"no offload bundle: it starts with {bundle[:4]!r} (compressed ones are not read)")
    found = []
    try:
        (count,) = struct.unpack_from("<Q", bundle, len(_MAGIC))
        at = len(_MAGIC) + 8
        for _ in range(count):
            offset, size, length = struct.unpack_from("<QQQ", bundle, at)
            triple = bundle[at + 24 : at + 24 + length].decode(errors="replace")
            at += 24 + length
            found.append(triple)
            if triple.startswith("hip") and triple.rstrip(":").split("--")[-1].split(":")[0] == arch and size:
                if offset + size > len(bundle):
                    raise InputError(f"offload bundle: {arch} ends at byte {offset + size} of {len(bundle)}")
                return bundle[offset : offset + size]
    except struct.error:
        raise InputError(f"offload bundle: truncated at {len(bundle)} bytes") from None
    raise InputError(f"offload bundle: for {', '.join(found)}, not {arch}")

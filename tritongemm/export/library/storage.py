"""Reads a library from disk, a folder or one archive whose members are not compressed. All of it is data.

Code objects are where their hash says, so that no manifest can name another place; an archive with any other member is
refused itself. They are read one by one on use, and refused unless they are what was written.
"""

import hashlib
import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tritongemm.core.errors import InputError, NewerFileError
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.export.library.code_object import OBJECTS, SUFFIXES, CodeObject, opened, sealed
from tritongemm.export.library.entry import HelperKey, LibraryEntry, LibraryHelper, LibraryKernel
from tritongemm.search_spaces import schema
from tritongemm.system import files
from tritongemm.system.printable import printable

MANIFEST = "library.json"
SCHEMA = 1  # of the manifest; it rises where a reader that ignores a new key would serve another kernel
_KIND = "tritongemm_library"  # the key that says what the manifest is; its value is the schema
MOST_MANIFEST_BYTES = 256 << 20
_MOST_MEMBERS = 1 << 17  # of an archive, and parts that a manifest lists
ARCHIVE_SUFFIX = ".zip"
_ARCHIVE_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of a member's name and of what follows it
_MEMBER = re.compile(rf"{OBJECTS}/[0-9a-f]{{64}}\.({'|'.join(SUFFIXES)})")
_DAMAGED = (InputError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


class Members(Protocol):
    """A reader of a library's files by name."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a member; None where there is none."""

    def read(self, name: str) -> bytes:
        """Return a member's bytes."""


class _Folder:
    """The files of a library that is a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self, name: str) -> int | None:
        try:
            status = (self._path / name).lstat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str) -> bytes:
        return files.read_regular(self._path / name, (self.size(name) or 0) + 1)


class _Archive:
    """A library that is a zip archive of members that are not compressed.

    The file stays open, so that what replaces it later does not matter, and each member is read in place.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        refuse = partial(_refuse, path)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            refuse("is no file")
        self._places: dict[str, tuple[int, int]] = {}
        try:
            with zipfile.ZipFile(self._file) as archive:
                members = archive.infolist()
                if len(members) > _MOST_MEMBERS:
                    refuse(f"has {len(members)} members, more than {_MOST_MEMBERS}")
                for member in members:
                    self._add(member, refuse)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
            refuse(f"is a damaged archive: {error}; copy it again")

    def _add(self, member: zipfile.ZipInfo, refuse: Any) -> None:
        name = member.filename
        if name != MANIFEST and not _MEMBER.fullmatch(name):
            refuse(f"holds {name!r}, which no library has; nothing of it is read")
        if name in self._places:
            refuse(f"holds {name} twice")
        if (
            member.compress_type != zipfile.ZIP_STORED
            or member.flag_bits & 1
            or member.file_size != member.compress_size
        ):
            refuse(f"holds {name} compressed or encrypted; libraries hold members as they are")
        at = member.header_offset
        if not 0 <= at <= os.fstat(self._file.fileno()).st_size - _LOCAL_HEADER.size:
            refuse(f"is a damaged archive: {name} is beyond its end; copy it again")
        header = os.pread(self._file.fileno(), _LOCAL_HEADER.size, at)
        self._places[name] = at + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header)), member.file_size

    def size(self, name: str) -> int | None:
        place = self._places.get(name)
        return place[1] if place else None

    def read(self, name: str) -> bytes:
        at, size = self._places[name]
        return os.pread(self._file.fileno(), size, at)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise InputError(f"{path} {printable(reason)}")


@dataclass(frozen=True)
class DamagedEntry:
    """An entry that can't be used."""

    name: str  # of what it is the result, as far as that is known
    reason: str  # what is wrong with it
    # What the manifest says of it, where that is complete and its code object is not.
    part: LibraryEntry | LibraryHelper | None = None

    def __str__(self) -> str:
        return f"{printable(self.name)}: {printable(self.reason)}"


@dataclass(frozen=True)
class KernelLibrary:
    """An open library."""

    path: Path  # as it was named
    digest: str  # SHA-256 of its manifest, which holds the hashes of all else
    entries: tuple[LibraryEntry, ...]  # that can be used, as far as that is known without their code
    damaged: tuple[DamagedEntry, ...]  # the others, and other parts that can't be used
    members: Members  # its files
    # Kernels beside the products, by what they are looked up by.
    helpers: Mapping[HelperKey, LibraryHelper] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)  # facts of architectures, by their names

    def read_code(self, kernel: CodeObject) -> bytes:
        """Return the code object of a kernel."""
        try:
            code = self.members.read(kernel.member)
        except (OSError, KeyError) as error:
            raise InputError(f"{self.path}: its code object {kernel.member} can't be read: {error}") from None
        if fault := kernel.fault(code):
            raise InputError(f"{self.path}: {fault}; build or copy the library again")
        return code

    def all_entries(self) -> list[LibraryEntry]:
        """Return the entries, also those whose code object is missing or cut."""
        return [*self.entries, *(one.part for one in self.damaged if isinstance(one.part, LibraryEntry))]

    def all_helpers(self) -> list[LibraryHelper]:
        """Return all helper kernels, also those whose code object is missing or cut."""
        return [*self.helpers.values(), *(one.part for one in self.damaged if isinstance(one.part, LibraryHelper))]

    def faults(self) -> dict[str, str]:
        """Return what is wrong with each part that can't be used, by its name; it reads every code object."""
        found = {entry.name: printable(entry.reason) for entry in self.damaged}
        codes = [(entry.name, entry.kernel) for entry in self.entries if entry.kernel is not None]
        for name, code in [*codes, *((helper.name, helper) for helper in self.helpers.values())]:
            try:
                self.read_code(code)
            except InputError as error:
                found[name] = str(error)
        return found


@dataclass(frozen=True)
class StoredCode:
    """A kernel of a library, with the library that holds its code."""

    library: KernelLibrary
    kernel: LibraryKernel

    def read(self) -> bytes:
        """Return the code object; errors are those of `KernelLibrary.read_code`."""
        return self.library.read_code(self.kernel)


def is_library(path: Path) -> bool:
    """Return whether a path is a folder with a manifest, or an archive, also one whose beginning is damaged."""
    if os.path.isdir(path):
        return os.path.isfile(path / MANIFEST)
    try:
        start = _start(path) if os.path.isfile(path) else b""
    except OSError:
        return False
    return is_archive(start) or (start != b"" and path.suffix == ARCHIVE_SUFFIX)


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_ARCHIVE_START))


def open_library(path: Path) -> KernelLibrary:
    """Read a library's manifest, and code objects on use; an InputError if that fails, or a newer version wrote it."""
    try:
        if os.path.isfile(path) and not is_library(path):
            _refuse(path, "is no library: it is neither a folder nor an archive")
        members: Members = _Folder(path) if os.path.isdir(path) else _Archive(path)
        size = members.size(MANIFEST)
        if size is None:
            _refuse(path, f"is no library: it has no {MANIFEST}")
        if size > MOST_MANIFEST_BYTES:
            _refuse(path, f"has a manifest of more than {MOST_MANIFEST_BYTES >> 20} MiB")
        text = members.read(MANIFEST)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such library") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # a name that the system does not take
        raise InputError(f"{printable(str(path))} can't be read: {error}") from None
    data = _read_manifest(path, text)
    entries, damaged = list[LibraryEntry](), list[DamagedEntry]()
    helpers, targets = dict[HelperKey, LibraryHelper](), dict[str, Target]()
    for number, entry in enumerate(data["entries"], 1):
        found = _read_entry(entry, number, members)
        (damaged if isinstance(found, DamagedEntry) else entries).append(found)  # type: ignore[arg-type]
    for number, one in enumerate(data["helpers"], 1):
        helper = _read_helper(one, number, members)
        if isinstance(helper, DamagedEntry):
            damaged.append(helper)
        else:
            helpers[helper.key] = helper
    for name, facts in data["targets"].items():
        target = _read_target(name, facts)
        if isinstance(target, DamagedEntry):
            damaged.append(target)
        else:
            targets[name] = target
    digest = hashlib.sha256(text).hexdigest()
    return KernelLibrary(path, digest, tuple(entries), tuple(damaged), members, helpers, targets)


def _read_manifest(path: Path, text: bytes) -> Mapping[str, Any]:
    """Return the parts of a manifest as they stand in it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {MANIFEST} is no JSON: {error}; copy the library again") from None
    version = data.get(_KIND) if isinstance(data, Mapping) else None
    if isinstance(version, int) and version > SCHEMA:
        raise NewerFileError(path, version, SCHEMA)
    if version != SCHEMA:
        raise InputError(f"{path}: {MANIFEST} is no manifest of a library")
    parts: dict[str, Any] = {"entries": list, "helpers": list, "targets": Mapping}
    if not all(isinstance(data.get(name), kind) for name, kind in parts.items()):
        raise InputError(
            f"{path}: {MANIFEST} must have lists of entries and helpers and a map of targets; build it again"
        )
    if (count := sum(len(data[name]) for name in parts)) > _MOST_MEMBERS:
        raise InputError(f"{path}: {MANIFEST} lists {count} parts, more than {_MOST_MEMBERS}")
    return {name: data[name] for name in parts}


def _read_entry(data: object, number: int, members: Members) -> LibraryEntry | DamagedEntry:
    try:
        entry = LibraryEntry.from_json(data)
    except _DAMAGED as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return DamagedEntry(_name_of(data, number), reason)
    missing = _why_missing(entry.kernel, members) if entry.kernel is not None else ""
    return DamagedEntry(entry.name, missing, entry) if missing else entry


def _read_helper(data: object, number: int, members: Members) -> LibraryHelper | DamagedEntry:
    try:
        helper = LibraryHelper.from_json(data)
    except _DAMAGED as error:
        return DamagedEntry(f"kernel {number} beside the products", str(error))
    missing = _why_missing(helper, members)
    return DamagedEntry(helper.name, missing, helper) if missing else helper


def _read_target(name: str, data: Any) -> Target | DamagedEntry:
    where = f"the facts of {name}"
    try:
        facts, known = opened(data)["facts"], {one.name for one in fields(Target)}
        # Earlier versions had facts that generated kernels alone need.
        return schema.read_target(where, name, {fact: value for fact, value in facts.items() if fact in known})
    except _DAMAGED as error:
        return DamagedEntry(where, str(error))


def _why_missing(code: CodeObject, members: Members) -> str:
    """Return why a code object can't be there; "" where it may be."""
    size = members.size(code.member)
    if size == code.size:
        return ""
    fault = "is missing" if size is None else f"has {size} bytes, not {code.size}"
    return f"its code object {code.member} {fault}"


def _name_of(data: Any, number: int) -> str:
    """Return the name of a damaged entry, where its record can still be read."""
    try:
        return LibraryEntry(Record.from_json(data["record"])).name
    except _DAMAGED:
        return f"entry {number}"


def manifest_text(
    entries: Sequence[LibraryEntry], helpers: Sequence[LibraryHelper] = (), targets: Sequence[Target] = ()
) -> str:
    """Return the manifest of these entries, kernels beside them and facts of targets."""
    listed = [",\n".join(_compact(one.to_json()) for one in several) for several in (entries, helpers)]
    facts = ",\n".join(f"{json.dumps(t.name)}:{_compact(sealed({'facts': schema.target_facts(t)}))}" for t in targets)
    return (
        f'{{"{_KIND}": {SCHEMA}, "entries": [\n{listed[0]}\n], "helpers": [\n{listed[1]}\n], '
        f'"targets": {{\n{facts}\n}}}}\n'
    )


def _compact(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def is_manifest(start: bytes) -> bool:
    """Return whether a file that begins so is a manifest."""
    return start.startswith(f'{{"{_KIND}"'.encode())


def is_archive(start: bytes) -> bool:
    """Return whether a file that begins so is an archive."""
    return start.startswith(_ARCHIVE_START)

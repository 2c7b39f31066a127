"""Publishes results as libraries, written completely or not at all; readers see the old one or the new."""

import io
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tritongemm.core.errors import OutputError
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.export.library import building, storage
from tritongemm.export.library.building import Built
from tritongemm.export.library.code_object import OBJECTS, CodeObject
from tritongemm.export.library.entry import EntryKey, HelperKey, LibraryEntry, LibraryHelper
from tritongemm.hip_ext.machine import Machine
from tritongemm.system import files, locks

ADVICE = "choose another place with -o"


@dataclass
class Contents:
    """The contents of a library to write."""

    entries: dict[EntryKey, LibraryEntry] = field(default_factory=dict)  # by what they are results of
    # What reads each code object, by its hash. Of a damaged one there is nothing to be read: what names it stays in the
    # manifest, where it is refused by name.
    codes: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    helpers: dict[HelperKey, LibraryHelper] = field(default_factory=dict)  # kernels beside the products
    targets: dict[str, Target] = field(default_factory=dict)  # facts of architectures

    @property
    def objects(self) -> list[CodeObject]:
        """The code objects of all entries and helpers."""
        kernels = [entry.kernel for entry in self.entries.values() if entry.kernel is not None]
        return [*kernels, *self.helpers.values()]

    def manifest(self) -> str:
        """Return the text of the library's manifest."""
        helpers = [self.helpers[key] for key in sorted(self.helpers)]
        return storage.manifest_text(self.listed(), helpers, [self.targets[name] for name in sorted(self.targets)])

    def listed(self) -> list[LibraryEntry]:
        """Return the entries in the order of their names, so that equal contents make equal files."""
        return sorted(self.entries.values(), key=lambda entry: (entry.name, entry.record.m_from))


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from writing a library."""
    with locks.held(path, ADVICE):
        _check_place(path)
        yield


def _check_place(path: Path) -> None:
    """Refuse to replace anything but a library, or an unfinished one."""
    if path.suffix == storage.ARCHIVE_SUFFIX:
        files.check_place(path, lambda start: not start or storage.is_archive(start), "an archive", ADVICE)
        return
    if path.exists() and not path.is_dir():
        raise OutputError(
            f"{path} is a file, and a library is a folder, or its name ends in {storage.ARCHIVE_SUFFIX}; {ADVICE}"
        )
    try:
        names = {one.name for one in path.iterdir()} if path.is_dir() else set()
        strange = storage.MANIFEST not in names and any(name != OBJECTS and not name.startswith(".") for name in names)
    except OSError as error:
        raise OutputError(f"{path} can't be read: {error.strerror}; {ADVICE}") from error
    if strange:
        raise OutputError(f"{path} is a folder of something else than a library; {ADVICE}")
    files.check_place(path / storage.MANIFEST, storage.is_manifest, "a manifest of a library", ADVICE)


def write(path: Path, contents: Contents) -> None:
    """Write a library, as an archive where the name ends in ``.zip``, else as a folder; `held` is around it.

    Code objects that no entry names any more stay in a folder: a process that read the manifest before may want them.
    """
    manifest, codes = contents.manifest(), contents.codes
    wanted = {one.member: codes[one.sha256] for one in contents.objects if one.sha256 in codes}
    if path.suffix == storage.ARCHIVE_SUFFIX:
        files.atomic_write(path, _archived(manifest, wanted), ADVICE)
        return
    for name, read in wanted.items():
        if not _is_there(path / name, code := read()):
            files.atomic_write(path / name, code, ADVICE)
    files.atomic_write(path / storage.MANIFEST, manifest, ADVICE)
    for folder in (path, path / OBJECTS):
        files.sweep(folder)


def _is_there(path: Path, code: bytes) -> bool:
    try:
        return files.read_regular(path) == code
    except OSError:
        return False


def _archived(manifest: str, members: Mapping[str, Callable[[], bytes]]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(
            zipfile.ZipInfo(storage.MANIFEST), manifest
        )  # dated 1980, so that equal contents are equal bytes
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name), members[name]())
    return out.getvalue()


def merge(contents: Contents, entries: Sequence[LibraryEntry], codes: Mapping[str, Callable[[], bytes]]) -> list[str]:
    """Add entries, of two for one thing the faster or the first; return a line for each pair: which is kept."""
    conflicts = []
    for entry in entries:
        other = contents.entries.setdefault(entry.key, entry)
        if other is not entry and _claim(other) != _claim(entry):
            kept, given_up = (entry, other) if _seconds(entry) < _seconds(other) else (other, entry)
            contents.entries[entry.key] = kept
            conflicts.append(f"{kept.name}: kept {_described(kept)}, not {_described(given_up)}")
    contents.codes |= {sha256: read for sha256, read in codes.items() if sha256 not in contents.codes}
    return conflicts


def readers(library: storage.KernelLibrary, faults: Container[str]) -> dict[str, Callable[[], bytes]]:
    """Return what reads each code object of a complete library, by its hash."""
    kernels = [(entry.name, entry.kernel) for entry in library.entries if entry.kernel is not None]
    named = [*kernels, *((helper.name, helper) for helper in library.helpers.values())]
    return {code.sha256: partial(library.read_code, code) for name, code in named if name not in faults}


def add_beside(
    contents: Contents,
    helpers: Iterable[LibraryHelper],
    targets: Mapping[str, Target],
    codes: Mapping[str, Callable[[], bytes]],
) -> None:
    """Add kernels beside the products and facts of architectures; of two for one thing the first counts."""
    for helper in helpers:
        if contents.helpers.setdefault(helper.key, helper) is helper:
            contents.codes.setdefault(helper.sha256, codes[helper.sha256])
    contents.targets |= {name: target for name, target in targets.items() if name not in contents.targets}


def _seconds(entry: LibraryEntry) -> tuple[bool, float]:
    return entry.record.predicted, entry.record.served_seconds


def _claim(entry: LibraryEntry) -> tuple[str, str, str, float]:
    """Return what two entries for one call must share to be no conflict."""
    record = entry.record
    return record.winner, record.config.name, entry.kernel.sha256 if entry.kernel else "", _seconds(entry)[1]


def _described(entry: LibraryEntry) -> str:
    record = entry.record
    what = record.config.name if record.winner == record.config.backend else record.winner
    binary = f" (code {entry.kernel.sha256[:12]})" if entry.kernel else ""
    return f"{what}{binary} of {record.served_seconds * 1e6:.2f} us"


@dataclass(frozen=True)
class Published:
    """The outcome of publishing tuned results as a library."""

    built: Built  # their entries, and what no library can hold
    contents: Contents  # of the library; without an entry none was written
    conflicts: tuple[str, ...]  # a line for each thing that two results claim

    def describe_missing(self) -> Iterator[str]:
        """Yield a line for each result and kernel that the library does not hold."""
        for record, reason in self.built.left_out:
            yield f"left out: {record.problem.key}: {reason}"
        for what, reason in self.built.compiled_late:
            yield f"not held: {what}: {reason}; where nothing compiles it, PyTorch computes it"


def publish(records: Sequence[Record], output: Path, here: Machine) -> Published:
    """Compile what the cache lacks of results, and write a library of them."""
    contents = Contents()
    with held(output):
        built = building.build(records, here)
        conflicts = merge(contents, built.entries, built.readers())
        if built.entries:
            add_beside(contents, built.helpers, built.targets, built.readers())
            write(output, contents)
    return Published(built, contents, tuple(conflicts))


def withdraw(output: Path) -> None:
    """Remove a library's manifest, so that it is no longer served; code objects stay for processes that serve them."""
    if (output / storage.MANIFEST).exists():
        with held(output):
            (output / storage.MANIFEST).unlink(missing_ok=True)

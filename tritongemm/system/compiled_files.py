"""Caches compiled files in a folder that users may share: only complete entries of trusted owners are used.

A folder that only its owner can write holds everybody's entries. In one that others can write too, which must have the
sticky bit, each user has a folder of its own, `user-<number>`, and reads those of trusted users. Entries that a user
can't write to the folder, e.g. because an administrator filled it for others to read, go to the user's default folder.

Permissions alone decide who is trusted: a file is used if only trusted users can have written it.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError, OutputError, TritonGemmError, UnavailableError
from tritongemm.system import settings
from tritongemm.system.temporary_folder import TemporaryFolder, sweep

ROOT = 0
GROUP = "group"  # among trusted names: all members of the folder's group


@dataclass(frozen=True)
class Owners:
    """Users whose files are used."""

    uids: frozenset[int]  # these, whatever their groups
    group: int | None = None  # whose members count too, or None

    def __contains__(self, uid: int) -> bool:
        """Return whether a user is one of them."""
        return uid in self.uids or (self.group is not None and is_member(uid, self.group))

    def may_use(self, status: os.stat_result) -> bool:
        """Return whether a file or folder is used: one of these users owns it, and no other can write it."""
        return status.st_uid in self and not others_write(status)


def others_write(status: os.stat_result) -> bool:
    """Return whether users beside the owner and this one can write a file or folder, by its mode."""
    if status.st_mode & stat.S_IWOTH:
        return True
    own = (status.st_uid, os.geteuid())
    return bool(status.st_mode & stat.S_IWGRP) and not any(is_private(uid, status.st_gid) for uid in own)


@cache
def is_private(uid: int, gid: int) -> bool:
    """Return whether a group is a user's alone: Debian and Fedora give each user one, and umask 002."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_name == group.gr_name and not set(group.gr_mem) - {user.pw_name}


@cache
def is_member(uid: int, gid: int) -> bool:
    """Return whether a user is in a group."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    return gid in os.getgrouplist(user.pw_name, user.pw_gid)


def owners(folder: Path, status: os.stat_result, names: Iterable[str]) -> Owners:
    """Return the users whose files in a folder are used: this one, root, those named, the owner if it is private."""
    wanted = list(names)
    uids = {ROOT, os.geteuid(), *(_uid(name) for name in wanted if name != GROUP)}
    if not others_write(status) and _put_by(folder, uids | {status.st_uid}):
        uids.add(status.st_uid)
    return Owners(frozenset(uids), status.st_gid if GROUP in wanted else None)


def _put_by(folder: Path, uids: set[int]) -> bool:
    """Return whether only these users can have put a folder, or a link to it, where it is."""
    found = map(os.stat, {*Path(os.path.abspath(folder)).parents, *folder.resolve().parents})
    return all(status.st_uid in uids and not others_write(status) for status in found)


def _uid(name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise InputError(
            f"TRITONGEMM_CACHE_TRUST names {name!r}, which is no user here; it takes names of users, or group"
        ) from None


_BUILT = "built.json"
_PRIVATE, _READABLE = 0o700, 0o755  # of folders, as those that others can write are not used
_NO_LINKS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class CompiledEntry:
    """The contents of the cache under one key."""

    path: Path  # folder of the files
    facts: dict[str, Any]  # JSON values stored with them
    files: Mapping[str, bytes]  # content by name


@dataclass(frozen=True)
class _Places:
    """The folders and owners of entries, and the folder of new ones; None where this user can't write any."""

    read: tuple[Path, ...]
    write: Path | None
    owners: Owners


class CompiledFiles:
    """Cache entries by key, each a folder of files that is written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> CompiledEntry | None:
        """Return an entry, or None if there is no complete one of a trusted owner."""
        try:
            places = self._places
        except OSError:  # there is no folder yet, or it can't be one
            return None
        found = next((e for e in (_read(_place(p, key), key, places.owners) for p in places.read) if e), None)
        return self._default.find(key) if found is None and places.write is None and self._default else found

    def keep(
        self,
        key: str,
        files: Mapping[str, bytes],
        facts: dict[str, Any],
        usable: Callable[[CompiledEntry], object] = lambda entry: entry,
    ) -> CompiledEntry:
        """Store files, by plain name, and JSON values under a key; readers see all of them or none.

        An existing entry stays, another process's too, and is returned, unless it is damaged or `usable` says that it
        is of no use.
        """
        try:
            _make(self.folder, self._folder_mode)
            if self._places.write is None and self._default is not None:
                return self._default.keep(key, files, facts, usable)
            return self._write(_place(self._places.write or self.folder, key), key, files, facts, usable)
        except (OSError, OutputError) as error:
            fault = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(fault, OSError):
                raise
            raise OutputError(
                f"compiled kernels can't be kept in {self.folder}: {fault.strerror}; make room, or name another folder "
                "in TRITONGEMM_CACHE, and run the same command again"
            ) from fault

    def sweep(self) -> None:
        """Remove the leftovers of processes that were killed while they stored something."""
        with suppress(OSError, TritonGemmError):  # there is no folder yet, or none that can be used
            sweep(str(self._places.write or self.folder))

    def open_verified(self, path: str, sha256: str) -> int:
        """Open a stored file and return its descriptor, after verifying the open file's owner, mode and content."""
        try:
            handle = os.open(path, _NO_LINKS)
            if _is_trusted_file(handle, self._places.owners) and _hash(_content(handle)) == sha256:
                return handle
        except OSError as error:
            raise UnavailableError(f"{path} can't be opened: {error.strerror}") from None
        os.close(handle)
        raise UnavailableError(f"{path} is not the file that was compiled; delete it, and it is compiled again")

    @cached_property
    def _places(self) -> _Places:
        status = os.stat(self.folder)
        shared = others_write(status)
        if shared and not status.st_mode & stat.S_ISVTX:
            raise OutputError(
                f"{self.folder} can be written by others, who could replace compiled kernels: run chmod g-w,o-w on it, "
                "or chmod +t if it is shared on purpose, or name another folder in TRITONGEMM_CACHE"
            )
        trusted = owners(self.folder, status, settings.cache_trust())
        own = self.folder / _user(os.geteuid()) if shared else self.folder
        writable = (shared or status.st_uid in trusted) and os.access(self.folder, os.W_OK | os.X_OK)
        write = own if writable or self._default is None else None
        return _Places((self.folder, *self._folders_of(trusted)), write, trusted)

    def _folders_of(self, trusted: Owners) -> Iterator[Path]:
        """Return the folders that trusted users have in this one."""
        users = set(trusted.uids)
        if trusted.group is not None:
            names = (p.name.partition("-") for p in self.folder.glob(_user("*")))
            users |= {int(n) for _, _, n in names if n.isascii() and n.isdigit() and int(n) in trusted}
        return (place for place in (self.folder / _user(uid) for uid in sorted(users)) if place.is_dir())

    @cached_property
    def _default(self) -> CompiledFiles | None:
        """Return the user's default folder, where this is another one."""
        try:
            folder = settings.default_cache_folder()
        except UnavailableError:
            return None
        return None if folder == self.folder else CompiledFiles(folder)

    @property
    def _folder_mode(self) -> int:
        return _READABLE if self._default else _PRIVATE

    def _write(
        self,
        place: Path,
        key: str,
        files: Mapping[str, bytes],
        facts: dict[str, Any],
        usable: Callable[[CompiledEntry], object],
    ) -> CompiledEntry:
        """Write an entry; return what is there then, another process's where that was first."""
        _make(place.parent, self._folder_mode)
        own = place.parents[1]
        if own != self.folder and not Owners(frozenset([os.geteuid()])).may_use(os.lstat(own)):
            raise OutputError(f"{own} is not this user's folder alone: remove it, or name another in TRITONGEMM_CACHE")
        built = {"key": key, "files": {name: _hash(content) for name, content in files.items()}, "facts": facts}
        text = json.dumps({**built, "sha256": _hash_of_facts(built)})
        with TemporaryFolder(str(own)) as new:
            for name, content in {**files, _BUILT: text.encode()}.items():
                with os.fdopen(os.open(new / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as out:
                    out.write(content)
            os.chmod(new, self._folder_mode)
            try:
                os.rename(new, place)
            except OSError:  # another process was first, or what can't be used is in the way
                entry = _read(place, key, self._places.owners)
                if entry is not None and usable(entry):
                    return entry
                _remove(place)
                os.rename(new, place)
        return CompiledEntry(place, facts, files)


def _user(uid: int | str) -> str:
    return f"user-{uid}"


def _place(folder: Path, key: str) -> Path:
    return folder / key[:2] / key


def _make(folder: Path, mode: int) -> None:
    """Make a folder and those above it where they are missing."""
    for one in reversed([folder, *folder.parents]):
        if not one.is_dir():
            try:
                os.mkdir(one, mode)
            except FileExistsError:
                if not one.is_dir():
                    raise NotADirectoryError(20, "Not a directory", str(one)) from None


def _remove(place: Path) -> None:
    """Remove what is in the way of an entry, as far as possible."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _read(place: Path, key: str, trusted: Owners) -> CompiledEntry | None:
    """Return an entry, if it is complete and of a trusted owner."""
    try:
        folder = os.open(place, _NO_LINKS | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        if not trusted.may_use(os.fstat(folder)):
            return None
        built = json.loads(_read_file(folder, _BUILT, trusted))
        said, hashes, facts = built.pop("sha256"), built["files"], built["facts"]
        if built["key"] != key or said != _hash_of_facts(built) or any("/" in name for name in hashes):
            return None
        files = {name: _read_file(folder, name, trusted) for name in hashes}
        complete = all(_hash(content) == hashes[name] for name, content in files.items())
        return CompiledEntry(place, facts, files) if complete else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finally:
        os.close(folder)


def _read_file(folder: int, name: str, trusted: Owners) -> bytes:
    """Return a file of an entry."""
    handle = os.open(name, _NO_LINKS, dir_fd=folder)
    try:
        if not _is_trusted_file(handle, trusted):
            raise PermissionError(f"{name} is no file of a trusted owner")
        return _content(handle)
    finally:
        os.close(handle)


def _is_trusted_file(handle: int, trusted: Owners) -> bool:
    status = os.fstat(handle)
    return stat.S_ISREG(status.st_mode) and trusted.may_use(status)


def _content(handle: int) -> bytes:
    with open(handle, "rb", closefd=False) as file:
        return file.read()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_of_facts(built: dict[str, Any]) -> str:
    return _hash(json.dumps(built, sort_keys=True).encode())

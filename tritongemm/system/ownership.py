"""Decides which users' files are used: those of trusted users that no other user can write."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tritongemm.core.errors import InputError

ROOT = 0
GROUP = "group"  # among trusted names: all members of the folder's group


@dataclass(frozen=True)
class Owners:
    """Users whose files are used.

    Attributes:
        uids: these, whatever their groups.
        group: whose members count too, or None.
    """

    uids: frozenset[int]
    group: int | None = None

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
    """Return the users whose files in a folder are used: this one, root, those named, and its owner if it is private.

    Args:
        folder: exists.
        status: of the folder.
        names: of trusted users, or their numbers, or ``group``.

    Raises:
        InputError: there is no such user.
    """
    wanted = list(names)
    uids = {ROOT, os.geteuid(), *(_uid(name) for name in wanted if name != GROUP)}
    if not others_write(status) and _put_by(folder, uids | {status.st_uid}):
        uids.add(status.st_uid)
    return Owners(frozenset(uids), status.st_gid if GROUP in wanted else None)


def _put_by(folder: Path, uids: set[int]) -> bool:
    """Return whether only these users can have put a folder, or a link to it, where it is."""
    above = {*Path(os.path.abspath(folder)).parents, *folder.resolve().parents}
    found = map(os.stat, above)
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

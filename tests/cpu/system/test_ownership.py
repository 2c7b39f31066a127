import grp
import os
import pwd
from pathlib import Path

import pytest

from tests.support.nouns import InputError, Patch, cases
from tests.support.owners import pretend
from tritongemm.system import compiled_files

ME, ADMIN, OTHER_USER, STAFF = 1000, 2000, 3000, 50


def status(uid: int, mode: int, gid: int = STAFF) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def users(monkeypatch: Patch) -> None:
    """User 1000 is alone in group 1000 of its name, 2000 shares its own group with another, and all are staff."""
    people = {ME: ("me", ME), ADMIN: ("admin", ADMIN), OTHER_USER: ("other", STAFF)}
    groups = {ME: ("me", []), ADMIN: ("admin", ["admin", "other"]), STAFF: ("staff", ["me", "admin", "other"])}

    def user(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((people[uid][0], "x", uid, people[uid][1], "", "/", ""))

    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: user(next(u for u in people if people[u][0] == name)))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((groups[gid][0], "x", gid, groups[gid][1])))
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, *(g for g in groups if name in groups[g][1])])
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    compiled_files.is_private.cache_clear()
    compiled_files.is_member.cache_clear()


@cases(
    (status(ME, 0o755), False),
    (status(ME, 0o757), True),
    (status(ME, 0o1777), True),
    (status(ME, 0o775), True),
    (status(ME, 0o775, gid=ME), False),  # as Debian and Fedora make folders
    (status(ADMIN, 0o775, gid=ADMIN), True),  # a group of that name, but not of that user alone
    (status(ADMIN, 0o775, gid=ME), False),  # that this user writes too is no surprise
    (status(ME, 0o775, gid=999), True),  # an unknown group
)
def test_who_writes_beside_the_owner(found: os.stat_result, others: bool, /) -> None:
    assert compiled_files.others_write(found) == others


def test_files_of_trusted_users_are_used_where_no_other_user_writes() -> None:
    some = compiled_files.Owners(frozenset([0, ME]))
    assert some.may_use(status(ME, 0o644)) and some.may_use(status(0, 0o644))
    assert not some.may_use(status(OTHER_USER, 0o600)) and not some.may_use(status(ME, 0o664))
    assert compiled_files.Owners(frozenset(), group=STAFF).may_use(status(OTHER_USER, 0o644))
    assert not compiled_files.Owners(frozenset(), group=STAFF).may_use(status(4000, 0o644)), "no member, or unknown"


@cases(
    (ADMIN, 0o755, (0, 0o755), True),  # filled by an administrator, for others to read
    (ADMIN, 0o755, (ADMIN, 0o755), True),
    (ADMIN, 0o1777, (0, 0o755), False),  # each writes there
    (OTHER_USER, 0o755, (0, 0o1777), False),  # in /tmp: any user who was first
    (OTHER_USER, 0o755, (STAFF, 0o755), False),  # another program put it there
)
def test_the_owner_of_a_folder_is_trusted_where_no_other_user_can_have_put_it(
    owner: int, mode: int, above: tuple[int, int], trusted: bool, /, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    pretend(monkeypatch, {Path("/"): (0, 0o755), tmp_path: above, folder: (owner, mode)})
    assert (owner in compiled_files.owners(folder, os.stat(folder), ())) == trusted
    assert {0, ME} <= compiled_files.owners(folder, os.stat(folder), ()).uids


def test_a_link_that_others_can_have_made_is_not_trusted(tmp_path: Path, monkeypatch: Patch) -> None:
    folder, link = tmp_path / "home" / "cache", tmp_path / "open" / "cache"
    folder.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(folder)
    pretend(monkeypatch, {Path("/"): (0, 0o755), folder: (OTHER_USER, 0o755), link.parent: (0, 0o1777)})
    assert OTHER_USER in compiled_files.owners(folder, os.stat(folder), ())
    assert OTHER_USER not in compiled_files.owners(link, os.stat(link), ())


def test_trusted_users_are_named(tmp_path: Path, monkeypatch: Patch) -> None:
    pretend(monkeypatch, {Path("/"): (0, 0o755), tmp_path: (0, 0o1777)}, gid=STAFF)
    found = compiled_files.owners(tmp_path, os.stat(tmp_path), ["admin", "4000"])
    assert {ADMIN, 4000} <= found.uids and OTHER_USER not in found
    assert OTHER_USER in compiled_files.owners(tmp_path, os.stat(tmp_path), ["group"])
    monkeypatch.undo()
    with pytest.raises(InputError, match="TRITONGEMM_CACHE_TRUST names 'no such user', which is no user here"):
        compiled_files.owners(tmp_path, os.stat(tmp_path), ["no such user"])

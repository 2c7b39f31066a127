import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nouns import OutputError, Patch, UnavailableError, cases, refuses
from tests.support.owners import pretend
from tritongemm.hip_ext import libraries
from tritongemm.system import compiled_files
from tritongemm.system.compiled_files import CompiledFiles

KEY, FILES, FACTS = "ab" * 20, {"kernel.co": b"machine code"}, {"threads": 64}
ME, OTHER, ADMIN = 1000, 3000, 2000
TOP = (0, 0o755)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Every user is user 1000 here, whose default folder is in the test's."""
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(compiled_files, "is_private", lambda uid, gid: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRITONGEMM_CACHE_TRUST", raising=False)
    whose(monkeypatch, {tmp_path: (ME, None)})
    return tmp_path / "home" / "tritongemm"


def whose(monkeypatch: Patch, owned: dict[Path, tuple[int, int | None]]) -> None:
    """What is not said to be another's is this user's or, above the tests' folders, root's."""
    pretend(monkeypatch, {Path("/"): TOP, **owned})


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder like /tmp, in which users 1000 and 3000 have entries."""
    folder = tmp_path / "shared"
    folder.mkdir()
    whose(
        monkeypatch,
        {
            tmp_path: (ME, None),
            folder: (0, 0o1777),
            folder / "user-1000": (ME, None),
            folder / "user-3000": (OTHER, None),
        },
    )
    return folder


def kept_by(uid: int, folder: Path, monkeypatch: Patch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid)
        return CompiledFiles(folder).keep(KEY, FILES, FACTS).path


def test_what_is_kept_is_found_complete_and_links_and_pipes_are_no_entries(tmp_path: Path, monkeypatch: Patch) -> None:
    whose(monkeypatch, {tmp_path: (ME, None)})
    kept = CompiledFiles(tmp_path / "deep" / "cache").keep(KEY, FILES, FACTS)
    assert CompiledFiles(tmp_path / "deep" / "cache").find(KEY) == kept
    assert (kept.facts, dict(kept.files)) == (FACTS, FILES)
    cache = CompiledFiles(tmp_path / "cache")
    entry = cache.keep(KEY, FILES, FACTS).path
    elsewhere = entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(elsewhere)
    assert cache.find(KEY) is None
    assert cache.keep(KEY, FILES, FACTS).path == entry and not entry.is_symlink() and cache.find(KEY)
    for name in ("kernel.co", "built.json"):
        (entry / name).unlink()
        (entry / name).symlink_to(elsewhere / name)
        assert cache.find(KEY) is None, name
        (entry / name).unlink()
        os.mkfifo(entry / name)
        assert cache.find(KEY) is None, "and no reader waits for a writer"
        cache.keep(KEY, FILES, FACTS)
        assert cache.find(KEY)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_nothing_that_is_kept_can_be_written_by_others(tmp_path: Path, home: Path, umask: int) -> None:
    """Whatever the umask: others may read a named folder, and have no access to the default one."""
    before = os.umask(umask)
    try:
        CompiledFiles(tmp_path / "named").keep(KEY, FILES, FACTS)
        CompiledFiles(home).keep(KEY, FILES, FACTS)
    finally:
        os.umask(before)
    modes = {
        p: stat.S_IMODE(p.lstat().st_mode)
        for top in ("named", "home")
        for p in [tmp_path / top, *(tmp_path / top).rglob("*")]
    }
    assert len(modes) == 11 and not any(mode & 0o022 for mode in modes.values())
    assert modes[tmp_path / "named"] == 0o755 & ~umask and modes[home] == 0o700 == modes[home.parent]


@cases(
    ("", OTHER, None),
    ("", ME, 0o777),
    ("built.json", OTHER, None),
    ("kernel.co", OTHER, None),
    ("kernel.co", ME, 0o666),
    ("built.json", ME, 0o664),
)
def test_an_entry_of_another_program_is_not_used(
    part: str, owner: int, mode: int | None, /, tmp_path: Path, monkeypatch: Patch
) -> None:
    cache = tmp_path / "cache"
    entry = CompiledFiles(cache).keep(KEY, FILES, FACTS).path
    mine: dict[Path, tuple[int, int | None]] = {tmp_path: (ME, None)}
    with monkeypatch.context() as patch:
        whose(patch, mine)
        assert CompiledFiles(cache).find(KEY)
    whose(monkeypatch, mine | {entry / part: (owner, mode)})
    assert CompiledFiles(cache).find(KEY) is None


def test_a_folder_that_anyone_can_change_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    for mode in (0o777, 0o775):
        with monkeypatch.context() as patch:
            whose(patch, {tmp_path: (ME, mode)})
            with pytest.raises(OutputError, match=r"can be written by others.*chmod g-w,o-w on it, or chmod \+t if"):
                CompiledFiles(tmp_path).find(KEY)
            with pytest.raises(OutputError, match=r"or name another folder in TRITONGEMM_CACHE"):
                CompiledFiles(tmp_path).keep(KEY, FILES, FACTS)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(compiled_files, "is_private", lambda uid, gid: True)
    whose(monkeypatch, {tmp_path: (ME, 0o775)})
    assert CompiledFiles(tmp_path).find(KEY) is None, "a group of one's own is not another user"


def test_a_folder_that_an_administrator_filled_is_read(tmp_path: Path, monkeypatch: Patch, home: Path) -> None:
    filled = tmp_path / "filled"
    theirs = CompiledFiles(filled).keep(KEY, FILES, FACTS).path
    whose(monkeypatch, {tmp_path: (0, None), filled: (ADMIN, 0o755), home.parent: (ME, None)})
    monkeypatch.setattr(os, "access", lambda path, mode: home.parent in (Path(path), *Path(path).parents))
    found = CompiledFiles(filled).find(KEY)
    assert found and found.path == theirs and CompiledFiles(filled).find("cd" * 20) is None
    mine = CompiledFiles(filled).keep("cd" * 20, FILES, FACTS)
    assert home in mine.path.parents and CompiledFiles(filled).find("cd" * 20) == mine
    assert [p.name for p in filled.iterdir()] == [KEY[:2]]


def test_users_of_a_shared_folder_have_entries_of_their_own(shared: Path, monkeypatch: Patch) -> None:
    assert kept_by(OTHER, shared, monkeypatch).parents[1].name == "user-3000"
    assert CompiledFiles(shared).find(KEY) is None, "only named users are trusted"
    mine = CompiledFiles(shared).keep(KEY, FILES, FACTS)
    assert mine.path.parents[1].name == "user-1000" and CompiledFiles(shared).find(KEY) == mine


def test_users_of_a_shared_folder_use_those_of_whom_they_trust(shared: Path, monkeypatch: Patch) -> None:
    theirs = kept_by(OTHER, shared, monkeypatch)
    for named, member in (("3000", False), ("group", True)):
        monkeypatch.setenv("TRITONGEMM_CACHE_TRUST", named)
        monkeypatch.setattr(compiled_files, "is_member", lambda uid, gid, member=member: member)
        found = CompiledFiles(shared).find(KEY)
        assert found and found.path == theirs, named
    monkeypatch.setattr(compiled_files, "is_member", lambda uid, gid: False)
    assert CompiledFiles(shared).find(KEY) is None
    monkeypatch.setenv("TRITONGEMM_CACHE_TRUST", "no such user")
    refuses("TRITONGEMM_CACHE_TRUST names 'no such user'", CompiledFiles(shared).find, KEY)


def test_a_folder_of_ones_own_that_another_program_made_is_not_written(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "trap").mkdir()
    (shared / "user-1000").symlink_to(tmp_path / "trap")
    with pytest.raises(OutputError, match="user-1000 is not this user's folder alone: remove it"):
        CompiledFiles(shared).keep(KEY, FILES, FACTS)
    assert not list((tmp_path / "trap").rglob("kernel.co"))


@pytest.fixture
def library(tmp_path: Path) -> Callable[[str], bytes]:
    """Shared objects whose `answer` is the number that they are made with; each leaves a file when it is loaded."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def make(number: str) -> bytes:
        source, out = tmp_path / "l.c", tmp_path / "l.so"
        loaded = f'void loaded(void) {{ fclose(fopen("{tmp_path}/{number}", "w")); }}'
        answer = f"int answer(void) {{ return {number}; }}"
        source.write_text(f"#include <stdio.h>\n__attribute__((constructor)) {loaded}\n{answer}\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(out)], check=True, timeout=60)
        return out.read_bytes()

    return make


def test_shared_objects_are_loaded_as_kept(tmp_path: Path, monkeypatch: Patch, library: Callable[[str], bytes]) -> None:
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))
    codes = {name: library(name) for name in ("11", "12", "13")}
    whose(monkeypatch, {tmp_path: (ME, None)})
    cache = CompiledFiles(tmp_path / "cache")
    for name in ("11", "12"):
        path = cache.keep(f"object-{name}", {"kernel.so": codes[name]}, {}).path / "kernel.so"
        assert libraries.load_kept(str(path), hashlib.sha256(codes[name]).hexdigest()).answer() == int(name)
    path = cache.keep("object-13", {"kernel.so": codes["13"]}, {}).path / "kernel.so"
    wanted = hashlib.sha256(codes["13"]).hexdigest()
    (tmp_path / "12").unlink()
    for fault in ("another program's", "replaced", "a link"):
        with monkeypatch.context() as patch:
            if fault == "another program's":
                whose(patch, {tmp_path: (ME, None), path: (OTHER, None)})
            elif fault == "replaced":
                path.write_bytes(codes["12"])
            else:
                path.unlink()
                path.symlink_to(tmp_path / "l.so")
            with pytest.raises(UnavailableError, match=r"is not the file that was compiled|can't be opened: Too many"):
                libraries.load_kept(str(path), wanted)
    assert not (tmp_path / "13").exists() and not (tmp_path / "12").exists()


def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: Patch) -> None:
    """It was storing something: the unfinished part is never found, and the next process removes it."""
    monkeypatch.undo()
    kept = CompiledFiles(tmp_path / "cache")
    kept.keep(KEY, FILES, FACTS)
    half = """
import os, signal, sys
from pathlib import Path
from tritongemm.system.temporary_folder import TemporaryFolder
folder = TemporaryFolder(sys.argv[1])
(folder.path / "kernel.co").write_bytes(b"machine")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", half, str(tmp_path / "cache")], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((tmp_path / "cache").iterdir())) == 2
    kept.sweep()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [KEY[:2]] and kept.find(KEY) is not None

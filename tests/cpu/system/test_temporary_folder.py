import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.nouns import Patch, each
from tritongemm.core.errors import OutputError
from tritongemm.system import temporary_folder
from tritongemm.system.files import atomic_write
from tritongemm.system.temporary_folder import TemporaryFolder, sweep


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary_folder, "MEMORY", str(tmp_path / "none"))
    return tmp_path


def leave_behind(place: Path) -> Path:
    """The folder of a process that was killed."""
    text = (
        "import os, signal\nfrom tritongemm.system.temporary_folder import TemporaryFolder\nkept = TemporaryFolder()\n"
        "(kept.path / 'work').write_text('')\nprint(kept.path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60)
    return Path(done.stdout.strip()).parent


def test_a_folder_is_its_users_alone_and_the_dead_are_swept(place: Path) -> None:
    with TemporaryFolder() as folder:
        (folder / "deep").mkdir()
        assert folder.parent.parent == place and folder.parent.stat().st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []
    kept = TemporaryFolder(str(place))
    del kept
    assert list(place.iterdir()) == [], "it is not used any more"
    dead = leave_behind(place)
    assert (dead / "files" / "work").exists()
    with TemporaryFolder() as alive:
        sweep()
        assert not dead.exists() and alive.is_dir()


def test_nothing_else_is_swept(place: Path) -> None:
    """Whatever it is called: what has no lock, is no folder, is another user's or open to others is not ours."""
    (place / "tritongemm-results1").mkdir()
    (place / "tritongemm-abcdefgh").mkdir(0o700)  # a name as ours, without a lock
    (place / "tritongemm-abcdefgh" / "results").touch()
    (place / "tritongemm-longer_name").mkdir(0o700)
    (place / "tritongemm-longer_name" / "lock").touch()
    (place / "tritongemm-file1234").touch()
    target = leave_behind(place)
    (place / "elsewhere").mkdir(0o700)
    (place / "tritongemm-linked12").symlink_to(target.rename(place / "elsewhere" / "folder"))
    leave_behind(place).chmod(0o777)
    before = sorted(place.rglob("*"))
    sweep()
    assert sorted(place.rglob("*")) == before


def test_a_process_that_died_beside_its_lock_leaves_an_empty_folder_which_is_swept(place: Path) -> None:
    (place / "tritongemm-abcdefgh").mkdir(0o700)
    sweep()
    assert list(place.iterdir()) == []


@each("before", ["tempfile.mkdtemp", "fcntl.flock"])
def test_a_folder_that_a_sweep_took_before_its_lock_is_made_again(place: Path, monkeypatch: Patch, before: str) -> None:
    original, swept = resolve_name(before), list[str]()

    def late(*given: Any, **named: Any) -> Any:
        first, made = not swept, original(*given, **named) if before == "tempfile.mkdtemp" else None
        swept.append("begun")
        if first:
            sweep()
        return made if before == "tempfile.mkdtemp" else original(*given, **named)

    monkeypatch.setattr(before, late)
    with TemporaryFolder() as folder:
        assert folder.is_dir() and len(list(place.iterdir())) == 1 and len(swept) > 1


def test_a_file_for_a_folder_that_is_removed_does_not_make_it_again(place: Path) -> None:
    with TemporaryFolder() as path:
        atomic_write(path / "one" / "first", "")
    with pytest.raises(OutputError, match="No such file"):
        atomic_write(path / "second", "")
    assert not any(place.iterdir())


def test_no_place_for_temporary_files_is_reported(place: Path) -> None:
    with pytest.raises(OutputError, match=r"no temporary folder can be made in .*none: .*; make room, or name another"):
        TemporaryFolder(str(place / "none"))
    sweep()  # a place that is not there holds nothing

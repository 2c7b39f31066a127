"""The search for vendors' libraries."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from tritongemm.core.errors import UnavailableError
from tritongemm.hip_ext import libraries


def test_a_missing_library_names_every_place(tmp_path: Path) -> None:
    (tmp_path / "libnothing.so.2").write_text("not a library")
    with pytest.raises(UnavailableError) as caught:
        libraries.load("Nothing", ("libnothing.so.2", "libnothing.so"), [tmp_path])
    text = str(caught.value)
    assert text.startswith(f"Nothing: no library found; looked for {tmp_path / 'libnothing.so.2'} (")
    assert "file too short" in text or "invalid ELF header" in text
    assert text.endswith("libnothing.so.2, libnothing.so")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_loaded_library_is_found_before_any_other(tmp_path: Path) -> None:
    path = tmp_path / "libloadedonce.so.3"
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o", str(path)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(path))
    assert libraries.mapped("libloadedonce.so") == path
    again = libraries.load("it", ("libloadedonce.so.1",))
    assert again._handle == loaded._handle
    assert libraries.mapped("libneverloaded.so") is None


def test_wheel_folders_are_found_without_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fakewheel/lib/deep").mkdir(parents=True)
    (tmp_path / "fakewheel/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert libraries.wheel_folders("fakewheel/lib/deep", "fakewheel/none", "no_such_wheel/lib") == [
        tmp_path / "fakewheel/lib/deep"
    ]

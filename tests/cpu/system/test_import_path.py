import sys
from pathlib import Path
from types import ModuleType

from tests.support import ROOT
from tests.support.nouns import Patch
from tritongemm.system import import_path

HOME = str(ROOT)


def run_by_name(monkeypatch: Patch, by_name: bool) -> None:
    """Have the program look as if `python -m` had started it, or as a script."""
    main = ModuleType("__main__")
    main.__spec__ = sys.__spec__ if by_name else None
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_what_python_adds_by_itself_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(stand := str(tmp_path))
    for by_name, path, expected in (
        (False, ["", "/a", HOME], ["/a", HOME]),  # python -c, and the prompt
        (True, [stand, "/a", HOME], ["/a", HOME]),  # python -m
        (True, [stand, stand, HOME], [stand, HOME]),  # once more in PYTHONPATH, by which the user trusts it
        (False, [stand, "/a", HOME], [stand, "/a", HOME]),  # the folder of a script
        (False, [".", "/a"], [HOME, "/a"]),  # the package was found by a path that is gone
    ):
        run_by_name(monkeypatch, by_name)
        monkeypatch.setattr(sys, "path", path)
        assert import_path.for_children() == expected
        import_path.leave_out_current_folder()
        assert sys.path == expected


def test_a_checkout_that_one_stands_in_is_kept(monkeypatch: Patch) -> None:
    monkeypatch.chdir(HOME)
    run_by_name(monkeypatch, True)
    for first in (HOME, ""):
        monkeypatch.setattr(sys, "path", [first, "/a"])
        assert import_path.for_children() == [HOME, "/a"]


def test_a_deleted_folder_holds_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run_by_name(monkeypatch, True)
    monkeypatch.setattr(sys, "path", [str(gone), HOME])
    assert import_path.for_children() == [str(gone), HOME]

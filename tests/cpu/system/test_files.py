import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nouns import OutputError, Patch, cases, each, fails, raising
from tritongemm.system import files, temporary_folder
from tritongemm.system.printable import TEXT_CHARACTERS, WORD_CHARACTERS, printable


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def link_to_text(path: Path) -> None:
    path.with_name("real").write_text("mine")
    path.symlink_to("real")


def write_protected(path: Path) -> None:
    path.write_text("mine")
    path.chmod(0o444)


@cases(
    (Path.mkdir, "a folder"),
    (os.mkfifo, "a pipe"),
    (bind_socket, "a socket"),
    (link_to_text, "a link"),
    (write_protected, "read-only, so it is not replaced"),
)
def test_others_files_are_kept(make: Callable[[Path], None], what: str, /, tmp_path: Path, monkeypatch: Patch) -> None:
    """It is reported before work starts, and holds for every text that is written."""
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    path = Path("out")
    make(path)
    before = path.lstat()
    complaint = rf"^out is {what}.*; choose another$"
    fails(OutputError, complaint, files.check_place, path, lambda start: True, "mine", "choose another")
    fails(OutputError, complaint, files.atomic_write, path, "new", "choose another")
    assert path.lstat() == before and len(list(tmp_path.iterdir())) <= 2, "no debris"
    if stat.S_ISLNK(before.st_mode):
        assert Path("real").read_text() == "mine"


@each("name", ["/proc/out", "n" * 250, "file/out", "/dev/null/out"])
def test_places_that_can_not_be_written_are_found_before_work_starts(tmp_path: Path, name: str) -> None:
    """A name may be so long that the text that is to take its place has none."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"can't be written: .*; choose another$"):
        files.check_place(tmp_path / name, lambda start: True, "mine", "choose another")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_can_not_be_looked_into(tmp_path: Path, monkeypatch: Patch) -> None:
    """A folder without the right to be searched, which stops every user but root."""
    monkeypatch.setattr(Path, "lstat", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(OutputError, match=r"out can't be written: Permission denied; choose another$"):
        files.check_place(tmp_path / "out", lambda start: True, "mine", "choose another")


def test_files_are_known_by_their_beginning_and_modes_and_edits_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"theirs" + b"x" * 10_000)
    with pytest.raises(OutputError, match="out is not mine; choose another"):
        files.check_place(path, lambda start: start.startswith(b"mine"), "mine", "choose another")
    files.check_place(path, lambda start: start.startswith(b"theirs") and len(start) < 10_000, "mine", "")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    path.write_text("old")
    path.chmod(0o640)
    files.atomic_write(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    names = [files.keep_edited(tmp_path / "out", data).name for data in (b"1", b"2", b"3")]
    assert names == ["out.edited", "out.edited.2", "out.edited.3"]
    assert [(tmp_path / name).read_bytes() for name in names] == [b"1", b"2", b"3"]


def test_no_other_process_is_waited_for(tmp_path: Path) -> None:
    """A pipe without a writer is refused at once, and a link is not followed."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        fails(OSError, "", files.read_regular, tmp_path / name)


def test_unfinished_texts_of_a_folder_are_swept(tmp_path: Path) -> None:
    unfinished, others = [".a.py.724.4d05fe43", ".b.py.9.00000000"], [".a.py", "a.py.724.4d05fe43", ".a.py.724.4d05fe4"]
    for name in (*unfinished, *others):
        (tmp_path / name).write_text("half")
    files.sweep(tmp_path, "a.py")
    assert {p.name for p in tmp_path.iterdir()} == {unfinished[1], *others}
    files.sweep(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == set(others)


@each(("name", "advice"), [("tritongemm-x", temporary_folder.TEMPORARY_ADVICE), ("mine", files.ADVICE)])
def test_a_full_folder_of_temporary_files_is_named(tmp_path: Path, monkeypatch: Patch, name: str, advice: str) -> None:
    """No other -o makes room there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / name).write_text("no folder")
    with pytest.raises(OutputError) as refused:
        files.atomic_write(tmp_path / name / "module.py", "text")
    assert str(refused.value).endswith(f"; {advice}")


def test_text_is_printable_and_no_word_is_long() -> None:
    for text in ("", "1.5 us, [bold]", "…/größe.yaml:key:", "a" * WORD_CHARACTERS):
        assert printable(text) == text
    assert printable("a\x1b[31mb\r\n\x9b\u202e\udcff\0") == "a\\x1b[31mb\\r\\n\\x9b\\u202e\\udcff\\x00"
    text = printable(f"M must be a number, not {'1' * 100_000}z; write 16")
    assert text.startswith("M must be a number, not 111") and text.endswith("1z; write 16")
    assert text.count("…") == 1 and len(text) < WORD_CHARACTERS + 50


@given(st.text(max_size=50), st.integers(0, 2000))
def test_it_is_short_and_prints(text: str, times: int) -> None:
    shown = printable(text * times)
    assert shown.isprintable() and len(shown) <= TEXT_CHARACTERS
    assert all(len(word) <= WORD_CHARACTERS for word in shown.split(" "))

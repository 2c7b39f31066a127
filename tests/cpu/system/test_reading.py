import json
import os
import threading
from pathlib import Path

import pytest

from tests.support.nouns import Patch, cases, each, raising, refuses
from tritongemm.system import reading
from tritongemm.system.reading import RepeatedKeyError, keys_once, open_bytes, read_bytes


@pytest.fixture(autouse=True)
def impatient(monkeypatch: Patch) -> None:
    monkeypatch.setattr(reading, "WRITER_SECONDS", 0.15)
    monkeypatch.setattr(reading, "SILENCE_SECONDS", 0.3)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_files_links_and_keys_that_repeat(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text\0\xff")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "file") == read_bytes(tmp_path / "link") == b"text\0\xff"
    assert read_bytes(tmp_path / "empty") == b""
    assert json.loads('{"a": {"b": 1}, "b": 2}', object_pairs_hook=keys_once) == {"a": {"b": 1}, "b": 2}
    with pytest.raises(RepeatedKeyError) as caught:
        json.loads('[{"b": 0, "a": 1, "c": 2, "c": 3, "a": 4}]', object_pairs_hook=keys_once)
    assert caught.value.key == "a"


def test_a_pipe_is_read_to_its_end_or_given_up(pipe: Path) -> None:
    text = b"0123456789" * 100_000  # more than a pipe holds at a time
    thread = threading.Thread(target=pipe.write_bytes, args=(text,))
    thread.start()
    assert read_bytes(pipe) == text
    thread.join()
    refuses(r"pipe is a pipe, and nothing came out of it in 0\.15 s", read_bytes, pipe)
    descriptor = os.open(pipe, os.O_RDWR)
    try:
        refuses(r"nothing came out of it in 0\.3 s", read_bytes, pipe)
    finally:
        os.close(descriptor)


@each("text", [b"", b"sizes"])
def test_what_a_command_prints(text: bytes) -> None:
    """As a shell's <(command) gives it: a pipe that is open, under the number of its descriptor."""
    ours, theirs = os.pipe()
    os.write(theirs, text)
    os.close(theirs)
    try:
        assert read_bytes(Path(f"/dev/fd/{ours}")) == text
    finally:
        os.close(ours)


@cases(
    ("/dev/zero", "/dev/zero is a device or a socket; name a file"),
    ("/dev/random", "is a device or a socket"),
    ("/dev", "/dev is a folder; name a file in it"),
    ("absent", "absent: there is no such file"),
    ("a" * 300, "can't be read: File name too long"),
    ("a\0b", "can't be read: embedded null"),
    ("a\ud800b", "can't be read: "),
)
def test_what_is_no_file(path: str, complaint: str, /) -> None:
    for read in (read_bytes, open_bytes):
        refuses(complaint, read, Path(path))


def test_a_file_or_what_a_pipe_gives_may_be_too_large(tmp_path: Path, pipe: Path, monkeypatch: Patch) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(reading.MOST_BYTES + 1)  # a hole: nothing is on the disk
    refuses("has more than 256 MiB", read_bytes, tmp_path / "large")
    descriptor = os.open(pipe, os.O_RDWR)
    try:
        os.set_blocking(descriptor, False)
        os.write(descriptor, b"0" * (1 << 15))
        monkeypatch.setattr(reading, "MOST_BYTES", 1 << 14)
        refuses("has more than 0 MiB", read_bytes, pipe)
    finally:
        os.close(descriptor)


def test_a_pipe_that_gives_more_than_there_is_room_for(pipe: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", raising(OSError(28, "No space left on device")))
    refuses(r"pipe: what it gives can't be kept: No space left .*; make room there", open_bytes, pipe)

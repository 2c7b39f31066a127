import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support import libraries, raising
from tests.support.libraries import linear, tuned
from tests.support.nouns import Capsys, OutputError, Patch, each
from tritongemm.cli import library as command
from tritongemm.export.library import writing
from tritongemm.export.library.entry import LibraryEntry
from tritongemm.export.library.storage import MANIFEST, open_library
from tritongemm.export.library.writing import Contents
from tritongemm.system import locks

SIZE = linear(16, 48, 64)


def test_of_two_results_the_faster_counts_and_a_library_by_its_own_time() -> None:
    slow, fast = libraries.entry(tuned(SIZE, 3e-6), b"slow"), libraries.entry(tuned(SIZE, 1e-6), b"fast")
    other = libraries.entry(tuned(linear(8, 48, 64)), b"other")
    elsewhere = libraries.entry(replace(slow.record, compute_units=80), b"slow")
    for first, second in ((slow, fast), (fast, slow)):
        found = libraries.contents((first, b""), (other, b""))
        (conflict,) = writing.merge(found, [second, elsewhere, other], {})
        assert found.entries == {e.key: e for e in (fast, other, elsewhere)}
        assert conflict.startswith("16x48x64_fp32_TN on sm90 of 132 compute units: kept ")
        assert "of 1.00 us, not " in conflict and conflict.endswith("of 3.00 us")
    assert writing.merge(found, [fast], {}) == [], "the same twice is no conflict"
    lost = tuned(SIZE, 4e-6, winner="torch")  # served in the 3 us of the library
    found = libraries.contents((libraries.entry(tuned(SIZE, 3.5e-6), b"code"), b"code"))
    (conflict,) = writing.merge(found, [LibraryEntry(lost)], {})
    assert list(found.entries.values()) == [LibraryEntry(lost)] and "kept torch of 3.00 us" in conflict


def test_commands_merge_list_and_verify(tmp_path: Path, capsys: Capsys) -> None:
    one, two, both = tmp_path / "one", tmp_path / "two.zip", tmp_path / "both.zip"
    libraries.write(one, tuned(SIZE, 3e-6), tuned(linear(32, 48, 64), m_from=1))
    libraries.write(two, tuned(SIZE, 1e-6), tuned(linear(8, 48, 64)))
    assert command.main(["merge", str(one), str(two), "-o", str(both)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{both}: 3 results, 3 with kernels of 0.0 MB, 1 conflicts (sha256 ")
    assert said.err.startswith("conflict: 16x48x64_fp32_TN on sm90")
    assert [e.record.seconds for e in open_library(both).entries if e.record.problem == SIZE] == [1e-6]
    assert command.main(["list", str(both)]) == 0
    listed = capsys.readouterr().out
    assert "1-32 sm90" in " ".join(listed.split())
    assert [line.split("x")[0] for line in listed.splitlines() if "x48x" in line] == ["8", "16", "32"], "by M"
    assert command.main(["verify", str(both), str(one)]) == 0
    (member, *_) = sorted((one / "objects").iterdir())
    member.write_bytes(b"x" * member.stat().st_size)
    assert command.main(["verify", str(one)]) == 1 and f"damaged: {one}: " in capsys.readouterr().err
    assert command.main(["merge", str(one), "-o", str(both)]) == 1, "the damaged one is left out, the others stay"
    assert len(open_library(both).entries) == 3 and not open_library(both).faults()


@pytest.mark.parametrize("name", ["out", "out.zip"])
def test_merges_at_once_lose_nothing(tmp_path: Path, name: str) -> None:
    sources = [tmp_path / f"{number}.zip" for number in range(1, 7)]
    for number, source in enumerate(sources, 1):
        libraries.write(source, tuned(linear(number, 48, 64)))
    argv = [["merge", str(source), "-o", str(tmp_path / name)] for source in sources]
    threads = [threading.Thread(target=partial(command.main, words)) for words in argv]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = open_library(tmp_path / name)
    assert sorted(e.record.problem.m for e in found.entries) == [1, 2, 3, 4, 5, 6] and not found.faults()


def test_names_of_one_folder_share_its_lock(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(locks, "_LOCK_SECONDS", 0.01)
    (tmp_path / "library").mkdir()
    (tmp_path / "link").symlink_to("library")
    monkeypatch.chdir(tmp_path / "library")
    for name in (Path("."), tmp_path / "link"):
        refused = pytest.raises(OutputError, match="another process holds")
        with writing.held(tmp_path / "library"), refused, writing.held(name):
            pass
        with writing.held(name):
            writing.write(name, Contents())
    assert open_library(tmp_path / "library").path == tmp_path / "library"


@pytest.mark.parametrize("name", ["out", "out.zip"])
def test_a_merge_leaves_damaged_entries_of_the_output_there(tmp_path: Path, name: str, capsys: Capsys) -> None:
    """Refused by name, until something complete takes their place."""
    records = [tuned(linear(m, 48, 64)) for m in (8, 16, 24)]
    out, other = tmp_path / name, tmp_path / "other"
    first = libraries.write(tmp_path / "complete", *records[:2])
    libraries.write(out, *records[:2])
    lost = first[0].kernel
    assert lost is not None
    contents = Contents({entry.key: entry for entry in first}, {})
    codes = writing.readers(open_library(tmp_path / "complete"), ())
    contents.codes = {sha256: read for sha256, read in codes.items() if sha256 != lost.sha256}
    writing.write(out, contents)
    if out.is_dir():
        (out / lost.member).unlink()
    libraries.write(other, records[2])
    assert command.main(["merge", str(other), "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert f"damaged: {out}: {first[0].name}" in said.err and "3 results" in said.out
    assert [one.name for one in open_library(out).damaged] == [first[0].name] and len(open_library(out).entries) == 2
    assert command.main(["merge", str(tmp_path / "complete"), "-o", str(out)]) == 1
    assert not open_library(out).faults() and len(open_library(out).entries) == 3


@each("name", ["out", "out.zip"])
def test_a_complete_copy_of_damaged_code_is_taken(tmp_path: Path, name: str, capsys: Capsys) -> None:
    """Code is known by its hash, so that one library's damage could stand for another one's complete copy."""
    records = [tuned(linear(m, 48, 64)) for m in (8, 16)]
    damaged, entire = tmp_path / "damaged", tmp_path / "complete"
    first = libraries.write(damaged, *records)[0]
    libraries.write(entire, *records)
    assert first.kernel is not None
    (damaged / first.kernel.member).write_bytes(b"?" * first.kernel.size)
    assert command.main(["merge", str(damaged), str(entire), "-o", str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert f"left out: {damaged}: {first.name}: its code object" in said and "error" not in said
    assert not open_library(tmp_path / name).faults() and len(open_library(tmp_path / name).entries) == 2
    assert command.main(["merge", str(entire), "-o", str(damaged)]) == 1
    assert not open_library(damaged).faults(), "what it held damaged was replaced"


def test_what_is_no_library_is_not_replaced(tmp_path: Path, monkeypatch: Patch) -> None:
    folder, text = tmp_path / "folder", tmp_path / "text.zip"
    folder.mkdir()
    (folder / "thesis.md").write_text("years of work")
    text.write_text("years of work")
    notes = tmp_path / "notes.txt"
    notes.write_text("years of work")
    places = (folder, "a folder of something else"), (text, "is not an archive"), (notes, "is a file, and a library")
    for path, complaint in places:
        with pytest.raises(OutputError, match=complaint), writing.held(path):
            pass
    (folder / "thesis.md").rename(folder / MANIFEST)
    with pytest.raises(OutputError, match="is not a manifest of a library"), writing.held(folder):
        pass
    monkeypatch.setattr(locks, "_LOCK_SECONDS", 0.01)
    with writing.held(tmp_path / "new.zip"), pytest.raises(OutputError, match="another process holds"):
        writing.held(tmp_path / "new.zip").__enter__()


def test_what_can_not_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    for path in (tmp_path / "library", tmp_path / "library.zip"):
        libraries.write(path, tuned(SIZE))
        before = open_library(path).digest
        entry = libraries.entry(tuned(linear(8, 48, 64)), b"other")
        assert entry.kernel is not None
        with pytest.raises(OutputError, match="is gone"), writing.held(path):
            writing.write(
                path,
                Contents({entry.key: entry}, {entry.kernel.sha256: raising(OutputError("the other library is gone"))}),
            )
        assert open_library(path).digest == before and not open_library(path).faults()

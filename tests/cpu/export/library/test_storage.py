import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import libraries
from tests.support.libraries import linear, tuned
from tests.support.nouns import InputError, apart, each, refuses
from tritongemm.export.library.entry import LibraryEntry
from tritongemm.export.library.storage import MANIFEST, KernelLibrary, is_library, open_library

RECORDS = tuned(linear(32, 48, 64), m_from=1), tuned(linear(16, 48, 64)), tuned(linear(8, 16, 32), winner="torch")


@pytest.fixture(params=["library", "library.zip"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    libraries.write(path, *RECORDS[:2])
    return path


def test_a_library_is_read_as_written_and_damaged_archives_reported_as_such(tmp_path: Path) -> None:
    found: list[KernelLibrary] = []
    for name in ("folder", "archive.zip"):
        written = libraries.write(tmp_path / name, *RECORDS[:2])
        assert is_library(tmp_path / name)
        found.append(open_library(tmp_path / name))
        assert {e.name: e.to_json() for e in found[-1].entries} == {e.name: e.to_json() for e in written}
        codes = [found[-1].read_code(e.kernel) for e in found[-1].entries if e.kernel is not None]
        assert sorted(codes) == sorted(f"code of {r.problem.key}".encode() for r in RECORDS[:2])
        assert not found[-1].damaged and not found[-1].faults()
    assert found[0].digest == found[1].digest, "ranks may have the one and the other"
    assert not is_library(tmp_path) and not is_library(tmp_path / "nothing")
    path = tmp_path / "k.zip"
    libraries.write(path, *RECORDS[:1])
    path.write_bytes(path.read_bytes()[100:-100])
    refuses("is a damaged archive", open_library, path)
    assert is_library(path)
    path.write_bytes(b"")
    assert not is_library(path), "nothing is lost where a library is written in its place"


def test_open_archives_stay_readable_and_sizes_without_a_kernel_are_kept(tmp_path: Path) -> None:
    entry = LibraryEntry(RECORDS[2])
    assert LibraryEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    path = tmp_path / "library.zip"
    libraries.write(path, *RECORDS[:2])
    before = open_library(path)
    libraries.write(path, RECORDS[0])
    assert len(before.entries) == 2 and not before.faults()


def _in_folder(path: Path, change: Callable[[str], str]) -> None:
    (path / MANIFEST).write_text(change((path / MANIFEST).read_text()))


@each(("old", "new"), [('"grid":[1', '"grid":[3'), ('"seconds":2e-06', '"seconds":1e-06'), ('"sm90"', '"sm80"')])
def test_an_edited_entry_is_refused_by_name(tmp_path: Path, old: str, new: str) -> None:
    libraries.write(tmp_path / "library", *RECORDS[:2])
    _in_folder(tmp_path / "library", lambda text: text.replace(old, new, 1))
    library = open_library(tmp_path / "library")
    (damaged,) = library.damaged
    assert damaged.name.startswith("16x48x64_fp32_TN on sm") and damaged.reason == "it was changed after it was written"
    assert len(library.entries) == 1


def test_damaged_code_is_never_given_out(tmp_path: Path) -> None:
    libraries.write(tmp_path / "library", *RECORDS[:2])
    first, second = sorted((tmp_path / "library" / "objects").iterdir())
    first.write_bytes(bytes(reversed(first.read_bytes())))
    (fault,) = open_library(tmp_path / "library").faults().values()
    assert f"its code object objects/{first.name} is damaged" in fault
    second.unlink()
    (damaged,) = open_library(tmp_path / "library").damaged
    assert damaged.reason == f"its code object objects/{second.name} is missing"
    first.write_bytes(b"longer than it was before")
    assert [d.reason.split(" has ")[1] for d in open_library(tmp_path / "library").damaged if " has " in d.reason]


def test_links_and_names_that_no_text_holds_are_refused(tmp_path: Path) -> None:
    """Of a member, and of the library itself."""
    libraries.write(tmp_path / "library", RECORDS[0])
    (member,) = (tmp_path / "library" / "objects").iterdir()
    member.rename(tmp_path / "elsewhere")
    member.symlink_to(tmp_path / "elsewhere")
    (damaged,) = open_library(tmp_path / "library").damaged
    assert damaged.reason.endswith("is missing")
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("\u00e9", "x")
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xfe"))
    for name in (path, "a" * 5000, "a\ud800", "a\0"):
        refuses(r"is a damaged archive|can't be read", open_library, Path(name))


@apart(
    ("../../etc/passwd", zipfile.ZIP_STORED, "which no library has"),
    ("/etc/passwd", zipfile.ZIP_STORED, "which no library has"),
    ("objects/../library.json", zipfile.ZIP_STORED, "which no library has"),
    ("code.py", zipfile.ZIP_STORED, "which no library has"),
    (f"objects/{'0' * 64}.cubin", zipfile.ZIP_DEFLATED, "compressed or encrypted"),
    (MANIFEST, zipfile.ZIP_STORED, "holds library.json twice"),
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_of_odd_members_are_refused(name: str, compression: int, complaint: str, /, tmp_path: Path) -> None:
    path = tmp_path / "library.zip"
    libraries.write(path, RECORDS[0])
    with zipfile.ZipFile(path, "a", compression) as archive:
        archive.writestr(name, b"x" * 100)
    refuses(complaint, open_library, path)


def test_what_is_no_library_is_refused(path: Path, tmp_path: Path) -> None:
    refuses("there is no such library", open_library, tmp_path / "nothing.zip")
    (tmp_path / "text.zip").write_text("no archive")
    refuses(r"text.zip is a damaged archive", open_library, tmp_path / "text.zip")
    (tmp_path / "empty").mkdir()
    refuses(f"it has no {MANIFEST}", open_library, tmp_path / "empty")
    if path.is_dir():
        for text, complaint in (("{", "is no JSON"), ("[]", "is no manifest"), ('{"entries": []}', "is no manifest")):
            (path / MANIFEST).write_text(text)
            refuses(complaint, open_library, path)
        (path / MANIFEST).write_text('{"tritongemm_library": 99, "entries": []}')
        refuses("a newer version of tritongemm wrote it", open_library, path)
        many = {"tritongemm_library": 1, "helpers": [], "targets": {}, "entries": [0] * ((1 << 17) + 1)}
        (path / MANIFEST).write_text(json.dumps(many))
        with pytest.raises(InputError, match="lists 131073 parts, more than 131072"):  # which would fill the memory
            open_library(path)
    else:
        path.write_bytes(path.read_bytes()[:-40])
        refuses("is a damaged archive", open_library, path)


@each("entry", [None, 7, [], {}, {"record": 1}, {"record": {}, "sha256": "x"}])
def test_an_entry_of_another_kind_costs_itself_alone(tmp_path: Path, entry: object) -> None:
    libraries.write(tmp_path / "library", RECORDS[0])

    def add(text: str) -> str:
        data = json.loads(text)
        data["entries"].append(entry)
        return json.dumps(data)

    _in_folder(tmp_path / "library", add)
    library = open_library(tmp_path / "library")
    assert len(library.entries) == 1 and [d.name for d in library.damaged] == ["entry 2"]


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_an_archive_with_any_bit_turned_gives_out_nothing_else(
    archive: tuple[bytes, dict[str, str]], at: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content, known = archive
    turned = bytearray(content)
    turned[int(at * len(turned))] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "turned.zip"
    path.write_bytes(turned)
    try:
        library = open_library(path)
    except InputError:
        return
    for entry in library.entries:
        assert known[entry.name] == json.dumps(entry.to_json()), "an entry is as it was written, or is refused"
        if entry.kernel is not None and entry.name not in library.faults():
            assert hashlib.sha256(library.read_code(entry.kernel)).hexdigest() == entry.kernel.sha256


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, str]]:
    path = tmp_path_factory.mktemp("archive") / "library.zip"
    libraries.write(path, *RECORDS[:2])
    return path.read_bytes(), {e.name: json.dumps(e.to_json()) for e in open_library(path).entries}


@each("offset", [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_member_beyond_the_end_of_an_archive_is_refused(tmp_path: Path, offset: int) -> None:
    """An archive may give a member's place in 64 bits."""
    path = tmp_path / "library.zip"
    libraries.write(path, RECORDS[1])
    data = bytearray(path.read_bytes())
    directory, reported = data.find(b"PK\1\2"), struct.pack("<HHQ", 1, 8, offset)
    name, more = struct.unpack_from("<HH", data, directory + 28)
    struct.pack_into("<H", data, directory + 30, more + len(reported))
    struct.pack_into("<I", data, directory + 42, 0xFFFFFFFF)
    end = data.rfind(b"PK\5\6")
    struct.pack_into("<I", data, end + 12, struct.unpack_from("<I", data, end + 12)[0] + len(reported))
    data[directory + 46 + name + more : directory + 46 + name + more] = reported
    path.write_bytes(data)
    refuses("is a damaged archive", open_library, path)

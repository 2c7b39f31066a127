import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support import DATA, ROOT, raising
from tests.support.nouns import DamagedFileWarning, OutputError, Patch, Problem, cases, each, fails, refuses
from tests.support.stores import (
    ONE,
    THREE,
    TWO,
    append,
    journal_lines,
    journal_of,
    known,
    record,
    rewrite_header,
    rows,
    take,
    trial,
    written,
)
from tritongemm.results import history, journal


def test_a_line_is_on_disk_when_the_call_returns(tmp_path: Path, monkeypatch: Patch) -> None:
    synced: list[int] = []
    real = os.fsync

    def noted(fd: int) -> None:
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    with take(tmp_path / "out.yaml") as store:
        before = len(synced)
        store.add_trials(ONE, [trial(0)])
        store.add_record(record(ONE))
        assert len(synced) == before + 2
        lines = [json.loads(x) for x in store.journal.read_text().splitlines()]
    assert [next(iter(x)) for x in lines] == ["header", "problem", "record"]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.support import stores as t
with t.take(Path({path!r})) as store:
    for number in range(100000):
        store.add_trials(t.ONE, [t.trial(number)])
        print(number, flush=True)
"""


def test_kill_nine_while_appending(path: Path) -> None:
    """What a killed run had said is done is there, once; while it lived, no one else could take the file."""
    text = WRITER.format(here=str(ROOT), path=str(path))
    writer = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout
        said = [int(writer.stdout.readline()) for _ in range(3)]
        fails(OutputError, rf"out\.yaml is held by another run \(process {writer.pid}\).*another -o", take, path)
        said += [int(writer.stdout.readline()) for _ in range(20)]
    finally:
        writer.send_signal(signal.SIGKILL)
    said += [int(x) for x in writer.communicate()[0].splitlines() if x.isdigit()]
    with take(path) as store:
        held = store.trials(ONE)
        assert {t.config.group_m - 1 for t in held.values()} >= set(said) and len(held) <= len(said) + 1
        store.add_trials(TWO, [trial(0)])
    lines = path.with_name("out.yaml.journal").read_text().splitlines()
    assert len(lines) == 1 + len(held) + 1 and all(json.loads(x) for x in lines)


@pytest.fixture(scope="module")
def entire(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("complete") / "out.yaml")


@given(share=st.floats(0, 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@example(share=0.0)
@example(share=1.0)
def test_torn_at_any_byte_loses_one_line_at_most(path: Path, entire: bytes, share: float) -> None:
    cut = round(share * len(entire))
    journal_of(path).write_bytes(entire[:cut])
    complete = entire[:cut].count(b"\n")
    with take(path) as store:
        held = len(known(store)) + len(store.records())
        assert held == max(0, complete - 1), "every line but the header and the torn one"
        store.add_trials(ONE, [trial(99)])
    lines = journal_of(path).read_bytes().splitlines()
    assert len(lines) == max(1, complete) + 1 and all(json.loads(x) for x in lines)
    journal_of(path).unlink()


@cases(
    b"{",
    b'"text"',
    b'{"problem": {"m": 0, "n": 1, "k": 1}, "trial": {}}',
    b"\0\0\0",
    b"\xff\xfe",
    b"[]",
    b'{"merged": []}',  # without a checksum
    b"[" * 200_000,
)
def test_a_damaged_line_costs_itself(damage: bytes, /, tmp_path: Path, entire: bytes) -> None:
    path = tmp_path / "out.yaml"
    lines = entire.splitlines()
    journal_of(path).write_bytes(b"\n".join([*lines[:3], damage, *lines[3:], b""]))
    with pytest.warns(DamagedFileWarning, match=r"out\.yaml\.journal: damaged lines \(4\) are passed over") as said:
        store = take(path)
    with store:
        assert len(said) == 1 and len(known(store)) == 6 and len(store.records()) == 3
        store.merge((ONE, TWO, THREE))
    assert rows(path) == [record(ONE), record(TWO), record(THREE)]


def test_a_changed_byte_of_a_line_is_noticed(path: Path, entire: bytes) -> None:
    """Also one that leaves values which can be: a time, a tile. Every byte of a line counts, the checksum's as well."""
    lines = entire.splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"record"' in line)
    for place in range(0, len(lines[number]) - 1, 7):
        changed = bytearray(lines[number])
        changed[place] ^= 1
        if changed[place] == ord("\n"):
            continue
        journal_of(path).write_bytes(b"".join([*lines[:number], bytes(changed), *lines[number + 1 :]]))
        read = journal.read(journal_of(path))
        assert list(read.damaged) == [number + 1] and len(read.lines) == len(lines) - 1, place


@cases(
    {}, None, [], "x", {"toolchain": {}, "protocol": {}}, {"target": "gfx942", "protocol": {}},
    {"target": "gfx942", "toolchain": None, "protocol": {}},
    {"target": "gfx942", "toolchain": {}, "protocol": None},
    {"target": 5, "toolchain": {}, "protocol": {}}, {"target": "gfx942", "toolchain": {"a": 1}, "protocol": {}},
    {"target": "gfx942", "toolchain": {}, "protocol": {}, "compute_units": -1},
)  # fmt: skip
def test_a_header_that_can_not_be_is_refused_or_set_aside(header: Any, /, tmp_path: Path, entire: bytes) -> None:
    """Nothing else records under which toolchain the rest was measured. What is merged first fits this run."""
    path = tmp_path / "out.yaml"
    journal_of(path).write_bytes(entire)
    append(path, {"record": record(Problem(9, 9, 9), target="sm90").to_json()})
    rewrite_header(path, header)
    before = journal_of(path).read_bytes()
    with pytest.raises(OutputError, match=r"journal: line 1, the header, is damaged \(.*use --no-resume") as said:
        take(path)
    assert "\n" not in str(said.value) and journal_of(path).read_bytes() == before and not path.exists()
    with pytest.warns(DamagedFileWarning):
        take(path, resume=False).close()
    assert path.with_name("out.yaml.journal.old").read_bytes() == before
    assert rows(path) == [record(ONE), record(TWO), record(THREE)] and len(journal_lines(path)) == 1


def test_a_full_disk_loses_nothing(path: Path, monkeypatch: Patch) -> None:
    """Whether the write fails, is cut short, or the sync fails: an error with advice, and complete lines only."""
    write, sync = os.write, os.fsync
    refuse = raising(OSError(errno.ENOSPC, "No space left on device"))
    with take(path) as store:
        store.add_trials(ONE, [trial(0)])
        before = store.journal.read_bytes()
        for name, replacement in (
            ("write", refuse),
            ("write", lambda fd, data: write(fd, data[: len(data) // 2])),
            ("fsync", refuse),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, replacement)
                with pytest.raises(
                    OutputError, match=r"No space left on device; what was there before is safe\. Make room"
                ):
                    store.add_trials(ONE, [trial(1), trial(2)])
                fails(OutputError, "", store.add_record, record(ONE))
            assert store.journal.read_bytes() == before
            assert len(store.trials(ONE)) == 1 and store.record(ONE) is None
        store.add_trials(ONE, [trial(1)])
    assert os.fsync is sync
    with take(path) as store:
        assert len(store.trials(ONE)) == 2


def test_a_disk_full_from_the_start(path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
        fails(OutputError, "No space left", take, path)
    take(path).close()  # and the lock was given back


def test_two_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with take(tmp_path / "out.yaml") as store:
        add: Callable[[int], None] = lambda n: store.add_trials((ONE, TWO)[n % 2], [trial(n), trial(n + 100)])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(40)))
    with take(tmp_path / "out.yaml") as store:
        assert len(known(store)) == 80


def test_a_damaged_journal_can_be_set_aside(path: Path, entire: bytes) -> None:
    lines = entire.splitlines(keepends=True)
    path.with_name("out.yaml.journal").write_bytes(b"".join([*lines[:2], b"{\n", *lines[2:]]))
    with pytest.warns(DamagedFileWarning):
        take(path, resume=False).close()
    assert rows(path) == [record(ONE), record(TWO), record(THREE)]
    take(path).close()


def test_a_write_that_can_not_even_be_undone(tmp_path: Path, monkeypatch: Patch) -> None:
    """The rest of a line stays for a moment; it is gone before the next one is written."""
    write = os.write
    with take(tmp_path / "out.yaml") as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
            patch.setattr(os, "ftruncate", raising(OSError(errno.EIO, "Input/output error")))
            fails(OutputError, "No space left", store.add_trials, ONE, [trial(0)])
        store.add_trials(ONE, [trial(1)])
        lines = store.journal.read_text().splitlines()
        assert len(lines) == 2 and "trial" in json.loads(lines[1])


REAL = DATA / "h200_fp8_journal.jsonl"


def test_a_recorded_journal() -> None:
    written = history.read(REAL)
    assert written.header["toolchain"]["device"] == "NVIDIA H200" and len(written.records) == 5 and not written.unread
    assert [tried.seconds for tried in written.tried] == sorted(tried.seconds for tried in written.tried)
    assert {tried.trial.status for tried in written.tried} == {"ok", "wrong", "out_of_resources"}


def test_seconds_of_runs_are_added_up_and_some_sizes_have_their_own(path: Path) -> None:
    """Each run counts from its own beginning."""
    with take(path):
        pass
    for number, elapsed in enumerate((1.0, 2.5, 0.5, 4.0)):
        append(path, {"problem": ONE.to_json(), "trial": trial(number).to_json(), "elapsed": elapsed})
    written = history.read(journal_of(path))
    assert [tried.seconds for tried in written.tried] == [1.0, 2.5, 3.0, 6.5] and written.seconds == 6.5
    with take(path):
        pass
    runs = [(ONE, 7.0), (ONE, 9.0), (TWO, 2.0), (ONE, 3.0), (TWO, 4.0)]  # the first knew one size alone
    for number, (problem, elapsed) in enumerate(runs):
        append(path, {"problem": problem.to_json(), "trial": trial(number).to_json(), "elapsed": elapsed})
    append(path, {"record": record(ONE).to_json(), "elapsed": 4.5}, {"record": record(TWO).to_json(), "elapsed": 5.0})
    written = history.read(journal_of(path), [TWO])
    assert [tried.seconds for tried in written.tried] == [2.0, 4.0] and written.records == (record(TWO),)


def test_a_run_writes_when_it_knew(tmp_path: Path) -> None:
    with take(tmp_path / "out.yaml") as store:
        store.add_trials(ONE, [trial(0)])
        store.add_trials(TWO, [trial(1), trial(2)], record(TWO))
        written = history.read(store.journal)  # while the run goes on
    first, second, third = (tried.seconds for tried in written.tried)
    assert 0 <= first <= second == third < 60 and written.records == (record(TWO),)
    with take(tmp_path / "out.yaml") as store:
        assert store.trials(ONE) and store.record(TWO) == record(TWO)


@each("elapsed", [-1, "1", True, None, [1], 1e999])
def test_a_trial_without_a_time_is_unread(tmp_path: Path, elapsed: object) -> None:
    with take(tmp_path / "out.yaml"):
        pass
    append(tmp_path / "out.yaml", {"problem": ONE.to_json(), "trial": trial(0).to_json(), "elapsed": elapsed})
    read = history.read(journal_of(tmp_path / "out.yaml"))
    assert (read.tried, read.unread, read.seconds) == ((), 1, 0.0)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    wrong = {"problem": ONE.to_json(), "trial": {**trial(1).to_json(), "samples": [-1.0]}}
    path = tmp_path / "journal"
    header, *rest = REAL.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + rest[0].replace(b"ok", b"oh") + journal.encode(wrong) + rest[1] + rest[2][:40])
    written = history.read(path)
    assert len(written.tried) == 1 and written.unread == 2


@each("text", ["", "M,N,K\n", json.dumps({"trial": 1})])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal"
    path.write_text(text, encoding="utf-8")
    refuses("is not a journal of tritongemm", history.read, path)

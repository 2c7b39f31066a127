"""How a journal's runs went."""

import json
from pathlib import Path

import pytest

from tests.support import DATA
from tests.support.stores import ONE, TWO, append, journal_of, record, take, trial
from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.results import history, journal

REAL = DATA / "h200_fp8_journal.jsonl"


def test_a_recorded_journal() -> None:
    written = history.read(REAL)
    assert written.header["toolchain"]["device"] == "NVIDIA H200" and len(written.records) == 5 and not written.unread
    assert [tried.seconds for tried in written.tried] == sorted(tried.seconds for tried in written.tried)
    assert {tried.trial.status for tried in written.tried} == {"ok", "wrong", "out_of_resources"}


def test_seconds_of_runs_that_go_on_are_added_up(tmp_path: Path) -> None:
    """Each run counts from its own beginning."""
    path = tmp_path / "out.yaml"
    with take(path):
        pass
    for number, elapsed in enumerate((1.0, 2.5, 0.5, 4.0)):
        append(path, {"problem": ONE.to_json(), "trial": trial(number).to_json(), "elapsed": elapsed})
    written = history.read(journal_of(path))
    assert [tried.seconds for tried in written.tried] == [1.0, 2.5, 3.0, 6.5] and written.seconds == 6.5


def test_some_sizes_have_the_seconds_of_their_own_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
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
    assert 0 <= first <= second == third < 60
    assert written.records == (record(TWO),)
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
    """And the line that is being written is none of them."""
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
    with pytest.raises(InputError, match="is not a journal of tritongemm"):
        history.read(path)

import dataclasses
import json
import math
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.nouns import DamagedFileWarning, OutputError, Patch, Problem, Trial, cases, fails, refuses, registry
from tests.support.stores import CONFIG, ONE, THREE, TWO, journal_of, record, rows, take, trial, written
from tritongemm.formats import Defaults, _gemm_rows, results_format
from tritongemm.results import schema
from tritongemm.results.journal import encode
from tritongemm.results.rewriting import HeldRows
from tritongemm.results.store import Store
from tritongemm.workloads import sizes

FOUR, FIVE = Problem(4, 4, 4), Problem(5, 5, 5)


def begun(path: Path) -> Store:
    with take(path) as store:
        for problem in (ONE, TWO, THREE):
            store.add_record(record(problem))
        store.merge()
    store = take(path)
    store.add_record(record(FOUR))
    return store


def test_edits_of_the_results_are_taken_over(path: Path, tmp_path: Path) -> None:
    with begun(path) as store:
        edited = [record(ONE), record(THREE, 7e-6), record(FIVE, 2e-6)]
        path.write_text("# my own remark\n" + results_format().write(edited))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.merge((FOUR,))
        assert rows(path) == [record(ONE), record(THREE, 7e-6), record(FIVE, 2e-6), record(FOUR)]
        store.add_record(record(ONE, 1e-6))
        store.merge((FOUR,))
    assert rows(path) == [record(ONE, 1e-6), record(THREE, 7e-6), record(FIVE, 2e-6), record(FOUR)]
    assert not list(tmp_path.glob("*.edited*"))


def test_an_edit_of_a_size_that_was_measured_meanwhile_gives_way(path: Path) -> None:
    with begun(path) as store:
        path.write_text(results_format().write([record(FOUR, 9e-3), record(ONE)]))
        store.merge((FOUR,))
    assert {r.problem: r.seconds for r in rows(path) if r} == {ONE: 1e-5, FOUR: 1e-5}


@cases(
    b"- {M: 1\n", b"\xff\xfe", b"- {M: 1, N: 1, K: 1}\n", results_format().write([record(ONE, target="sm90")]).encode()
)
def test_an_edit_that_can_not_be_read_is_kept_beside(text: bytes, /, tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    with begun(path) as store:
        path.write_bytes(text)
        with pytest.warns(DamagedFileWarning, match=r"was edited while .*edited text is kept in .*out\.yaml\.edited"):
            store.merge((FOUR,))
    assert (tmp_path / "out.yaml.edited").read_bytes() == text
    assert rows(path) == [record(ONE), record(TWO), record(THREE), record(FOUR)]


def test_a_run_that_has_nothing_to_add_leaves_an_edit_alone(path: Path, tmp_path: Path) -> None:
    with begun(path) as store:
        store.merge()
        path.write_bytes(b"- {M: 1\n")
        store.merge()
    assert path.read_bytes() == b"- {M: 1\n" and not list(tmp_path.glob("*.edited*"))


@cases(
    ("seconds", math.nan), ("seconds", 1e-320), ("target", "sm90"), ("toolchain", None), ("problem", "abc"),
    ("config", CONFIG.name.replace("tile", "zzz.tile")), ("problem", {**ONE.to_json(), "family": "absent"}),
)  # fmt: skip
def test_a_damaged_value_does_not_poison_the_results(field: str, value: Any, /, tmp_path: Path) -> None:
    """The line is passed over although its checksum agrees, and the results stay readable."""
    path = tmp_path / "out.yaml"
    entries = [{k: v for k, v in json.loads(line).items() if k != "crc32"} for line in written(path).splitlines()]
    place = next(n for n, e in enumerate(entries) if e.get("record", {}).get("problem") == TWO.to_json())
    entries[place]["record"][field] = value
    journal_of(path).write_bytes(b"".join(map(encode, entries)))
    with pytest.warns(DamagedFileWarning, match=rf"damaged lines \({place + 1}\) are passed over"):
        store = take(path)
    with store:
        assert store.record(TWO) is None, "it is measured again"
        store.merge((ONE, TWO, THREE))
    assert rows(path) == [record(ONE), record(THREE)]


def test_rows_are_replaced_one_by_one(tmp_path: Path) -> None:
    path, other = tmp_path / "tuned.yaml", replace(record(ONE), compute_units=80)
    lines = results_format().write([record(ONE), record(TWO), other]).splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    held = HeldRows(path)
    assert held.has(record(TWO)) and not held.has(replace(record(TWO), seconds=1.0))
    faster = [replace(one, seconds=one.seconds / 2) for one in (record(TWO), other)]
    for before, after, place in zip((record(TWO), other), faster, (2, 3), strict=True):
        fails(OutputError, "is held by another run", HeldRows, path)
        assert held.replace(before, after)
        lines[place] = results_format().write([after]).splitlines()[-1]
        assert path.read_text(encoding="utf-8").splitlines() == lines
    held.close()
    HeldRows(path).close()


def test_what_can_not_be_rewritten_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("- {'M': 16, 'N': 16, 'K': 16, 'dtype_a': 'bf16'}\n", encoding="utf-8")
    for _ in range(2):  # the first lets go of the file
        refuses("sizes without a result", HeldRows, path)


MANY = [dataclasses.replace(ONE, m=m) for m in range(1, 101)]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    path = tmp_path / "out.yaml"
    with take(path) as store:
        for problem in MANY:
            store.add_trials(problem, [trial(n) for n in range(3)], record(problem))
        store.merge(MANY)
    return path


@pytest.fixture
def calls(monkeypatch: Patch) -> Counter[str]:
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return plain(*args)

        monkeypatch.setattr(owner, name, counted)

    count(Problem, "__eq__")
    count(_gemm_rows, "make_problem")
    count(registry, "family_of")
    return counts


def test_no_row_is_compared_with_every_problem(done: Path, calls: Counter[str]) -> None:
    with take(done, problems=MANY) as store:
        assert all(store.record(problem) for problem in MANY)
    assert calls["__eq__"] < 20 * len(MANY)


def test_what_rows_have_in_common_is_looked_up_once(done: Path, calls: Counter[str]) -> None:
    assert len(sizes.from_file(done, Defaults())) == len(MANY)
    assert calls["make_problem"] == 1 and calls["family_of"] == 2


def test_trials_are_read_when_they_are_asked_for(done: Path, monkeypatch: Patch) -> None:
    """A finished run asks for none of the thousands that it tried."""
    read: list[bytes] = []
    plain = schema.UnreadTrial.read

    def counted(unread: schema.UnreadTrial) -> Trial:
        read.append(unread.line)
        return plain(unread)

    monkeypatch.setattr(schema.UnreadTrial, "read", counted)
    with take(done, problems=MANY) as store:
        assert all(store.record(problem) for problem in MANY) and not read
        assert [t.config.group_m for t in store.trials(MANY[7]).values()] == [1, 2, 3] and len(read) == 3
        store.add_trials(MANY[8], [trial(1, status="timeout", samples=(), reason="late")])
        assert [t.status for t in store.trials(MANY[8]).values()] == ["ok", "timeout", "ok"], "the later one counts"


def test_a_trial_that_can_not_be_is_passed_over_when_it_is_asked_for(path: Path) -> None:
    """Its line is as it was written: by a version that had a fault."""
    with take(path) as store:
        store.add_trials(ONE, [trial(0)])
        store._append([{"problem": ONE.to_json(), "trial": {**trial(1).to_json(), "samples": [-1.0]}}])
    with take(path) as store, pytest.warns(DamagedFileWarning, match="a trial of 16x16x16_fp16_TT can't be, and is"):
        assert [t.config.group_m for t in store.trials(ONE).values()] == [1]

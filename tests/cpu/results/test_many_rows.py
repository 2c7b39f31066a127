"""Files of thousands of results: what is done once for each row, and not once for each pair of them."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import ONE, record, take, trial
from tritongemm.core.errors import DamagedFileWarning
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.formats import Defaults, _gemm_rows
from tritongemm.plugins import registry
from tritongemm.results import schema
from tritongemm.workloads import sizes

MANY = [dataclasses.replace(ONE, m=m) for m in range(1, 101)]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """The files of a finished run of many sizes."""
    path = tmp_path / "out.yaml"
    with take(path) as store:
        for problem in MANY:
            store.add_trials(problem, [trial(n) for n in range(3)], record(problem))
        store.merge(MANY)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often functions were called, by name."""
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


def test_trials_are_read_when_they_are_asked_for(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_trial_that_can_not_be_is_passed_over_when_it_is_asked_for(tmp_path: Path) -> None:
    """Its line is as it was written: by a version that had a fault."""
    path = tmp_path / "out.yaml"
    with take(path) as store:
        store.add_trials(ONE, [trial(0)])
        wrong = {"problem": ONE.to_json(), "trial": {**trial(1).to_json(), "samples": [-1.0]}}
        store._append([wrong])
    with take(path) as store, pytest.warns(DamagedFileWarning, match="a trial of 16x16x16_fp16_TT can't be, and is"):
        assert [t.config.group_m for t in store.trials(ONE).values()] == [1]

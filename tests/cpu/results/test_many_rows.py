"""Files of thousands of results: what is done once for each row, and not once for each pair of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import ONE, record, take, trial
from tritongemm.core.problem import Problem
from tritongemm.formats import Defaults, _gemm_rows
from tritongemm.plugins import registry
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

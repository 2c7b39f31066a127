"""The examples in the docstrings of the public functions do what they say, on a machine without a GPU."""

import doctest
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.support.evaluators import passed
from tests.support.tables import each
from tritongemm.measure.offline_evaluator import OfflineEvaluator

PUBLIC = [name for name in tritongemm.__all__ if not name.startswith("__")]


@each("name", PUBLIC)
def test_an_example_is_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_gpu: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    known = {"torch": torch, "tritongemm": tritongemm}
    example = doctest.DocTestParser().get_doctest(getattr(tritongemm, name).__doc__, known, name, None, None)
    assert example.examples, f"{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    assert not report, "".join(report)

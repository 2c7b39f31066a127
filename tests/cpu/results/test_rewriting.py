"""Rows of a results file are replaced one by one, and the others stay where they are."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stores import ONE, TWO, record
from tritongemm.core.errors import InputError, OutputError
from tritongemm.formats import results_format
from tritongemm.results.rewriting import HeldRows


def test_rows_are_replaced_one_by_one(tmp_path: Path) -> None:
    path, other = tmp_path / "tuned.yaml", replace(record(ONE), compute_units=80)
    lines = results_format().write([record(ONE), record(TWO), other]).splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    held = HeldRows(path)
    assert held.has(record(TWO)) and not held.has(replace(record(TWO), seconds=1.0))
    faster = [replace(one, seconds=one.seconds / 2) for one in (record(TWO), other)]
    for before, after, place in zip((record(TWO), other), faster, (2, 3), strict=True):
        with pytest.raises(OutputError, match="is held by another run"):
            HeldRows(path)
        assert held.replace(before, after)
        lines[place] = results_format().write([after]).splitlines()[-1]
        assert path.read_text(encoding="utf-8").splitlines() == lines
    held.close()
    HeldRows(path).close()


def test_what_can_not_be_rewritten_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("- {'M': 16, 'N': 16, 'K': 16, 'dtype_a': 'bf16'}\n", encoding="utf-8")
    for _ in range(2):  # the first lets go of the file
        with pytest.raises(InputError, match="sizes without a result"):
            HeldRows(path)

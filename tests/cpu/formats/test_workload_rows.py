"""Rows of sizes that say how often, by which operation and by whom they were called."""

from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.workloads import sizes

SIZE = "'M': 5, 'N': 6, 'K': 7, 'dtype_a': 'bf16'"


def read(folder: Path, *rows: str) -> list[FormatRow]:
    path = folder / "shapes.yaml"
    path.write_text("".join(f"- {{{row}}}\n" for row in rows), encoding="utf-8")
    return sizes.from_file(path, Defaults())


def test_counts_operations_and_callers_are_read(tmp_path: Path) -> None:
    (row,) = read(tmp_path, f"{SIZE}, 'count': 30, 'operation': 'linear', 'callers': ['a.*.b', 'c']")
    assert (row.count, row.operation, row.callers) == (30, "linear", ("a.*.b", "c"))
    (row,) = read(tmp_path, SIZE)
    assert (row.count, row.operation, row.callers) == (1, "", ())


def test_rows_of_one_problem_are_one_size(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        SIZE,
        f"{SIZE}, 'count': 3, 'operation': 'linear', 'callers': ['a']",
        f"{SIZE}, 'bias': 'n', 'count': 2, 'operation': 'linear'",
        f"{SIZE}, 'count': 4, 'operation': 'mm', 'callers': ['b', 'a']",
    )
    assert [(row.count, row.operation, row.callers) for row in rows] == [
        (8, "linear, mm", ("a", "b")),
        (2, "linear", ()),
    ]


@each(
    ("text", "written"),
    [
        ("'count': 0", "count must be above 0"),
        ("'count': 1.0e+300", "count must be at most 1000000000000000000, not 1e"),
        ("'count': -1", "count must be a number of at least 0"),
        ("'count': .nan", "count must be a number of at least 0"),
        ("'count': [1]", "count must be a number of at least 0"),
        ("'operation': 3", "operation must be text"),
        ("'callers': 'a'", "callers must be a list of text"),
        ("'callers': [1]", "callers must be a list of text"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, text: str, written: str) -> None:
    with pytest.raises(InputError, match=rf"shapes.yaml: row 1 \(line 1\) {written}"):
        read(tmp_path, f"{SIZE}, {text}")


def test_sizes_of_no_program_are_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="repeats row 1"):
        read(tmp_path, SIZE, f"{SIZE}, 'count': 2")

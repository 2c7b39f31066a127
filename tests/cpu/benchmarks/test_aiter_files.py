"""The files of sizes that the benchmark of AITER's families writes."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tritongemm.formats import Defaults
from tritongemm.workloads import sizes


@pytest.fixture
def files() -> Any:
    return importlib.import_module("aiter_files")


def test_every_file_is_read_as_its_familys_sizes(files: Any, tmp_path: Path) -> None:
    for model in files.LAYERS:
        for family in files.COLUMNS:
            if not files.list_rows(model, family):
                continue
            path = files.write_file(tmp_path, model, family)
            rows = sizes.from_file(path, Defaults())
            if family == "fmoe":
                assert len(rows) == 2 * 28 and {row.problem.group_count for row in rows} == {256}
                continue
            assert 27 <= len(rows) <= 64, (model, family, len(rows))
            assert len({row.problem for row in rows}) == len(rows)
            assert {row.problem.layout for row in rows} == {"TN"}
            assert ("batched" in family) == all(row.problem.batch > 1 for row in rows)


def test_one_type_of_fp8_may_stand_for_int8(files: Any, tmp_path: Path) -> None:
    path = files.write_file(tmp_path, "llama_70b", "a8w8", "torch.float8_e4m3fn")
    assert {row.problem.a.dtype for row in sizes.from_file(path, Defaults())} == {"fp8e4m3fn"}

"""Sizes from options and from files of any format."""

import os
from pathlib import Path

import pytest

from tests.support.plugins import dropped
from tests.support.tables import each
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.formats import Defaults, FormatRow
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Format
from tritongemm.workloads import sizes


def test_options() -> None:
    flags = Defaults.of("bf16", layout="TN", bias="n")
    assert sizes.from_options(16, 32, 64, flags) == [
        FormatRow(Problem(16, 32, 64, *matrices("bf16", layout="TN"), bias="n"), None, None, None)
    ]


@each(("size", "complaint"), [((0, 1, 1), "M must"), ((1, -4, 1), "N must"), ((1, 1, 2**31), "K must")])
def test_options_out_of_range(size: tuple[int, int, int], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        sizes.from_options(*size, Defaults())


def test_file_of_any_name(tmp_path: Path) -> None:
    for name in ("sizes.yaml", "sizes.txt", "sizes"):
        path = tmp_path / name
        path.write_text("# mine\n- {M: 1, N: 2, K: 3}\n")
        assert [r.problem for r in sizes.from_file(path, Defaults())] == [Problem(1, 2, 3)]


def test_what_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text(" \n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "table.csv").write_text("a,b,c\n")
    (tmp_path / "words.txt").write_text("hello there\n")
    for name, complaint in {
        "absent.yaml": "there is no such file",
        "": "is a folder",
        "empty.yaml": "is empty; write one line a size",
        "binary.yaml": "is not text",
        "table.csv": "line 1 names no column M, N, K",
        "words.txt": r"is in no known format .*a line for each, such as - {M: 4096, N: 4096, K: 8192}",
    }.items():
        with pytest.raises(InputError, match=complaint):
            sizes.from_file(tmp_path / name, Defaults())


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "sizes.yaml").touch()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r"sizes\.yaml can't be read: Permission denied"):
        sizes.from_file(tmp_path / "sizes.yaml", Defaults())


def test_a_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's file, dropped into formats/, is found, asked and used."""
    with dropped(Format, "format_toy", tmp_path, monkeypatch) as name:
        assert name in registry.names(Format)
        table = tmp_path / "table.csv"
        table.write_text("toy,M,N,K\na,4,5,6\nb,7,8,9\n")
        problems = [Problem(*size, *matrices("bf16")) for size in ((4, 5, 6), (7, 8, 9))]
        assert sizes.from_file(table, Defaults.of("bf16")) == [FormatRow(p, line=n) for n, p in enumerate(problems, 2)]


def test_a_format_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files are read; for one that no format claims the error names what could not be asked."""
    (file := tmp_path / "toy_csv.py").write_text("import no_such_package\n")
    with dropped(Format, file, tmp_path, monkeypatch):
        (good := tmp_path / "sizes.yaml").write_text("- {M: 1, N: 2, K: 3}\n")
        (bad := tmp_path / "table.csv").write_text("toy,M,N,K\na,4,5,6\n")
        assert len(sizes.from_file(good, Defaults())) == 1
        with pytest.raises(InputError, match=r"no known format .*toy_csv needs a package that is missing: .*no_such"):
            sizes.from_file(bad, Defaults())


TILE = "M: 16, N: 16, K: 16, BLOCK_SIZE_M: {}, BLOCK_SIZE_N: 16, BLOCK_SIZE_K: 16"


def test_a_kernel_of_another_backend_may_have_no_tile(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(f"- {{{TILE.format(0)}, backend: torch, num_stages: 0}}\n")
    (row,) = sizes.from_file(path, Defaults())
    assert row.config and (row.config.block_m, row.config.num_stages) == (0, 0)


def test_stages_of_an_older_triton(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(f"- {{{TILE.format(16)}, num_stages: 0}}\n")
    (row,) = sizes.from_file(path, Defaults())
    assert row.config and row.config.num_stages == 2

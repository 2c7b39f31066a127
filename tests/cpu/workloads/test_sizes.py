"""Sizes from options and from files of any format."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tritongemm import formats
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem
from tritongemm.formats import Defaults, FormatRow
from tritongemm.plugins import _modules as registry
from tritongemm.workloads import sizes


def test_options() -> None:
    flags = Defaults("bf16", row_major_b=False, bias="n")
    assert sizes.from_options(16, 32, 64, flags) == [
        FormatRow(Problem(16, 32, 64, "bf16", "bf16", "bf16", True, False, "n"), None, None, None)
    ]


@pytest.mark.parametrize(
    ("size", "complaint"), [((0, 1, 1), "M must"), ((1, -4, 1), "N must"), ((1, 1, 2**31), "K must")]
)
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
    (tmp_path / "table.csv").write_text("M,N,K\n")
    for name, complaint in {
        "absent.yaml": "there is no such file",
        "": "is a folder",
        "empty.yaml": "is empty; write one line a size",
        "binary.yaml": "is not text",
        "table.csv": "is in no known format; there are: .*tune_gemm's YAML",
    }.items():
        with pytest.raises(InputError, match=complaint):
            sizes.from_file(tmp_path / name, Defaults())


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InputError, match=r"sizes\.yaml can't be read: Permission denied"):
        sizes.from_file(tmp_path / "sizes.yaml", Defaults())


def test_a_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module dropped into interop/ is found, asked and used."""
    (tmp_path / "toy_csv.py").write_text(
        "from tritongemm.formats import FormatRow as Row\n"
        "FORMAT = 'toy CSV'\n"
        "def recognises(path, text): return text.startswith('toy')\n"
        "def read(path, text, defaults):\n"
        "    return [Row(defaults.problem(*map(int, line.split(','))), line=n)\n"
        "            for n, line in enumerate(text.splitlines()[1:], 2)]\n"
    )
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    try:
        assert "toy_csv" in registry.names("formats")
        assert "_shared" not in registry.names("formats")
        table = tmp_path / "table.csv"
        table.write_text("toy\n4,5,6\n7,8,9\n")
        read = sizes.from_file(table, Defaults("bf16"))
        assert read == [
            FormatRow(Problem(4, 5, 6, "bf16", "bf16", "bf16"), line=2), FormatRow(Problem(7, 8, 9, "bf16", "bf16", "bf16"), line=3)
        ]  # fmt: skip
    finally:
        sys.modules.pop("tritongemm.formats.toy_csv", None)

"""The arguments of `tritongemm capture`."""

from pathlib import Path

import pytest

from tests.support.tables import each
from tritongemm.cli import capture, shell


@each(
    ("words", "reported"),
    [
        ([], "there is no program to run"),
        (["nowhere.py"], "nowhere.py: there is no such script"),
        (["-m", "no.such.module"], "there is no module no.such.module"),
        (["-o", "program.py", "program.py"], "program.py is not a list of sizes"),
        (["-o", "other.csv", "program.py"], "other.csv is not a file of AITER's sizes"),
        (["-o", "columns.csv", "program.py"], "columns.csv has columns M,N,K,q_dtype_w, not M,N,K,bias"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], reported: str
) -> None:
    for name, text in (("program.py", "print(1)\n"), ("other.csv", "a,b\n"), ("columns.csv", "M,N,K,q_dtype_w\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITONGEMM_CAPTURE", "")  # so that what the command sets is undone
    assert capture.main(words) == shell.REFUSED
    assert reported in capsys.readouterr().err

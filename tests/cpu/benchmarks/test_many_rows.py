"""benchmarks/many_rows.py writes the files of a run that finished."""

import importlib
from pathlib import Path

import pytest

from tritongemm.cli import tune
from tritongemm.formats import Defaults
from tritongemm.workloads import sizes


@pytest.mark.usefixtures("without_gpu")
def test_its_files_are_those_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("many_rows")
    problems = script.make_problems(9)
    script.write_results(tmp_path, problems)
    defaults = Defaults.of("bf16", c="bf16")
    assert [row.problem for row in sizes.from_file(tmp_path / "sizes.yaml", defaults)] == problems
    assert [row.problem for row in sizes.from_file(tmp_path / "done.yaml", Defaults())] == problems
    before = (tmp_path / "done.yaml").read_bytes()
    monkeypatch.chdir(tmp_path)
    assert tune.main(script.COMMAND) == 0
    assert "9 of 9 sizes are in done.yaml already" in capsys.readouterr().err
    assert (tmp_path / "done.yaml").read_bytes() == before

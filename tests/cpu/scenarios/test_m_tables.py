import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Defaults, Patch, Problem, Record, matrices, sizes
from tritongemm.cli import tune
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.serving.record_table import RecordTable

pytestmark = pytest.mark.usefixtures("without_gpu")
SEARCH = ["--target", "gfx1100", "--budget", "2", "--num_threads", "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    monkeypatch.chdir(tmp_path)


def test_a_workload_becomes_tables_that_a_second_run_finds_done(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "shapes.yaml").write_text(
        "- {M: 24, N: 48, K: 64, rowMajorB: N, count: 40, operation: linear, callers: [q_proj]}\n"
        "- {M: 1, N: 48, K: 64, rowMajorB: N, count: 900}\n"
        "- {M: 24, N: 8, K: 1, rowMajorB: N, count: 1}\n"
        "- {M: 2, N: 48, K: 64, rowMajorB: N, dtype_a: fp8e4m3fnuz, count: 3}\n"
    )
    argv = ["--workload", "shapes.yaml", *SEARCH, "-o", "tuned.yaml"]
    assert tune.main(argv) == 0
    said = capsys.readouterr()
    out = said.out + said.err
    assert "left out: N 8, K 1, fp16 TN: 0." in out and "% of the workload's time" in out
    assert "left out: shapes.yaml: row 4 (line 4): 2x48x64" in out
    assert "M of N 48, K 64, fp16 TN" in out and re.search(r"held-out M: \d+ predicted;", out)
    records = [row.record for row in sizes.from_file(tmp_path / "tuned.yaml", Defaults()) if row.record]
    table = RecordTable(records)
    for m in range(1, 25):
        found = table.find(Problem(m, 48, 64, *matrices(layout="TN")), "gfx1100", records[0].compute_units)
        assert isinstance(found, Record) and found.serves(m)
    before = (tmp_path / "tuned.yaml").read_bytes()
    assert tune.main(argv) == 0
    assert (tmp_path / "tuned.yaml").read_bytes() == before and "trials:" not in str(capsys.readouterr())


def test_a_range_is_of_n_and_k(tmp_path: Path) -> None:
    assert tune.main(["--m_range", "3-9", "-n", "48", "-k", "64", "-col_b", *SEARCH, "-o", "tuned.yaml"]) == 0
    rows = [row.record for row in sizes.from_file(tmp_path / "tuned.yaml", Defaults()) if row.record]
    spans = sorted((r.m_from, r.problem.m) for r in rows if r.m_from)
    assert spans[0][0] == 3 and spans[-1][1] == 9
    assert all(after[0] == before[1] + 1 for before, after in pairwise(spans))

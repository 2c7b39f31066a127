import json
from pathlib import Path

import pytest

from tests.support.call_logs import line
from tests.support.evaluators import passed
from tests.support.nouns import Capsys, Defaults, Patch, cases, sizes
from tritongemm.cli import optimize, shell
from tritongemm.measure.offline_evaluator import OfflineEvaluator

pytestmark = pytest.mark.usefixtures("without_gpu")

# Small sizes, and the target with the smallest space, so that planning takes no time.
LOG = "".join(line(m=16, n=n, k=16, count=n) for n in (16, 8, 5))
SEARCH = ("-a", "gfx1100", "--population", "3", "--generations", "1", "--num_threads", "1")


def log_in(folder: Path) -> str:
    path = folder / "job.log"
    path.write_text(LOG)
    return str(path)


def run(folder: Path, *words: str) -> int:
    return optimize.main([*words, "-o", str(folder / "tunings"), *SEARCH])


def test_from_a_log_to_merged_results(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    folder = tmp_path / "tunings"
    assert run(tmp_path, log_in(tmp_path), "--only", "configs", "--log_summary") == shell.DONE
    printed = str(capsys.readouterr())
    assert "What takes the time" in printed and "BBS_TN_2" in printed and "ms, predicted" in printed
    assert run(tmp_path, "--only", "tune") == shell.DONE and run(tmp_path, "--only", "merge") == shell.DONE
    rows = sizes.from_file(folder / "merged.yaml", Defaults())
    other = tmp_path / "other.yaml"
    other.write_text((folder / "merged.yaml").read_text(), encoding="utf-8")
    assert run(tmp_path, "--only", "merge", "--with", str(other)) == shell.DONE
    assert [row.problem for row in sizes.from_file(folder / "merged.yaml", Defaults())] == [r.problem for r in rows]
    assert {row.problem.key for row in rows} == {f"{m}x16x16_bf16_TN" for m in (16, 8, 5)}
    assert all(row.record and row.record.target == "gfx1100" and row.record.timer == "model" for row in rows)
    modules = {path.name for path in (folder / "tuned_kernels").glob("*.py")}
    assert modules == {f"gemm_{m}_16_16_bf16_TN.py" for m in (16, 8, 5)}, "modules of candidates are not kept"
    trials = [json.loads(text) for text in (folder / "tuned.yaml.journal").read_text().splitlines()]
    screened = [entry["trial"]["config"] for entry in trials if entry.get("trial", {}).get("stage") == "screen"]
    assert len(screened) == 9, "three of a generation of three products"
    assert run(tmp_path, "--only", "tune") == shell.DONE and "3 of 3 GEMMs are in" in capsys.readouterr().err


@cases(
    ("", "job.log is empty"),
    (LOG[:90], "line 1: the row is cut"),
    ("- {M: 1}\n", "in no known format|has no N, K"),
    (line(m=16, n=16, k=16, beta="1.0"), "none of its 1 GEMMs can be computed"),
)
def test_logs_that_can_t_be(text: str, complaint: str, /, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "job.log"
    path.write_text(text)
    assert run(tmp_path, str(path)) == shell.REFUSED
    reported = capsys.readouterr().err
    assert reported.count("error: ") == 1 and any(one in reported for one in complaint.split("|")), reported
    assert not list(tmp_path.glob("tunings/gemms.csv"))


@cases((("--libtype", "abacus", "--log_summary"), "abacus"), (("--devices", "0,3"), "need a GPU"))
def test_what_is_not_there_is_reported_before_anything_is_measured(
    words: tuple[str, ...], complaint: str, /, tmp_path: Path, capsys: Capsys
) -> None:
    assert run(tmp_path, log_in(tmp_path), *words) == shell.REFUSED
    assert complaint in capsys.readouterr().err and not (tmp_path / "tunings").exists()


def test_the_last_stages_need_a_gpu(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """A campaign that did all that can be done here has not failed; who asks for such a stage alone is refused."""
    monkeypatch.setattr(OfflineEvaluator, "_interpret", passed)
    assert run(tmp_path, log_in(tmp_path)) == shell.DONE
    reported = capsys.readouterr().err
    assert "benchmark and filter: left to do, as they measure and no GPU" in reported
    assert "or name a Ray cluster" in reported and f"copy {tmp_path / 'tunings'}" in reported
    assert "error" not in reported and run(tmp_path, "--only", "benchmark") == shell.REFUSED
    assert "error: the benchmark measures, and no GPU" in capsys.readouterr().err
    assert json.loads((tmp_path / "tunings" / "campaign.json").read_text())["done"] == ["configs", "tune", "merge"]
    assert not (tmp_path / "tunings" / "results").exists()

"""A campaign on this machine's GPUs: weights are measured, all devices tune, and the results are measured ones."""

import csv
from pathlib import Path

import pytest

from tests.support.call_logs import line
from tritongemm.cli import optimize, shell
from tritongemm.formats import Defaults
from tritongemm.hip_ext.machine import Machine, count_devices
from tritongemm.workloads import sizes

# One product that takes most, one below the threshold, one that can't be computed, and a bias and a batch.
LOG = (
    line(m=4096, n=256, k=4096, count=100)
    + line("bench", m=64, n=16, k=64)
    + line(m=1024, n=512, k=1024, bias="true", count=50)
    + line(m=256, n=128, k=256, batch=8, count=50)
    + line(m=1024, n=512, k=1024, beta="1.0", count=10)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gpu_machine: Machine) -> Path:
    """A campaign after its third stage."""
    place = tmp_path_factory.mktemp("campaign")
    (place / "job.log").write_text(LOG)
    for stage in ("configs", "tune", "merge"):
        words = [str(place / "job.log"), "-o", str(place / "tunings"), "--only", stage, "--thr", "1"]
        assert optimize.main([*words, "--population", "8", "--generations", "2"]) == shell.DONE
    return place / "tunings"


def test_weights_are_measured(folder: Path) -> None:
    with (folder / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["baseline"] for row in rows].count("measured") == 4
    assert [row["note"] for row in rows if row["baseline"] == "roofline"] == ["its beta is 1; here it is 0"]
    assert rows[0]["problem"] == "256x4096x4096_bf16_TN" and float(rows[0]["% of total"]) > 30
    assert sum(float(row["% of total"]) for row in rows) == pytest.approx(100, abs=0.01)
    assert len((folder / "baseline.journal").read_text().split()) > 4


def test_results_are_measured_and_verified(folder: Path) -> None:
    rows = sizes.from_file(folder / "merged.yaml", Defaults())
    assert {row.problem.key for row in rows} >= {"256x4096x4096_bf16_TN", "512x1024x1024_bf16_TN_biasn"}
    for row in rows:
        assert row.record is not None and row.record.timer != "model" and row.record.library_seconds
        assert row.record.error is not None and row.record.tolerance is not None
        assert row.record.error <= row.record.tolerance


def test_every_device_worked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuned again by all devices, each of which says how busy it was."""
    for path in folder.glob("tuned.yaml*"):
        path.unlink()
    words = ["-o", str(folder), "--only", "tune", "--population", "8", "--generations", "2"]
    assert optimize.main(words) == shell.DONE
    reported = capsys.readouterr().err
    assert sum(one.startswith("device ") and " busy " in one for one in reported.splitlines()) == count_devices()

import csv
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

import tritongemm
from tests.support import ROOT
from tests.support.call_logs import line
from tests.support.nouns import Capsys, Config, Defaults, Machine, Problem, Record, matrices, registry, results_format
from tritongemm.campaigns.driver import STAGES
from tritongemm.cli import check, optimize, shell, tune
from tritongemm.hip_ext.machine import count_devices
from tritongemm.plugins.contracts import Timer
from tritongemm.report.progress import RunProgress
from tritongemm.system import settings
from tritongemm.workloads import sizes

SIZES = "- {M: 16, N: 512, K: 1024, rowMajorB: N}\n- {M: 250, N: 328, K: 520, rowMajorB: N, bias: n}\n"


@pytest.fixture(scope="module")
def folder(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tuned")
    (made / "sizes.yaml").write_text(SIZES)
    return made


def run(*argv: str) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        status = tune.main(argv)
    return status, out.getvalue()


def argv(folder: Path) -> list[str]:
    size_file, output = str(folder / "sizes.yaml"), str(folder / "out.yaml")
    return ["--gemm_size_file", size_file, "-dtype_a", "bf16", "--compare", "--budget", "60", "-o", output]


@pytest.fixture(scope="module")
def tuned(folder: Path) -> str:
    status, out = run(*argv(folder))
    assert status == 0, out
    return out


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((folder / "out.yaml").read_text())
    return found


def test_results_are_measured_beside_the_library(tuned: str, folder: Path, gpu_machine: Machine) -> None:
    assert f"tuning on {gpu_machine.product}" in tuned and "library us" in tuned and "ratio" in tuned
    assert "of 2 sizes won" in tuned
    assert [(r["M"], r["N"], r["K"]) for r in rows(folder)] == [(16, 512, 1024), (250, 328, 520)]
    for row in rows(folder):
        assert row["timer"] == "graph-events" and row["library"] == "torch"
        assert 0 < row["time(us)"] < 1e4 and 0 < row["library_us"] < 1e4
        assert 0 < row["error"] <= row["tolerance"] and row["verified"].startswith("float64 ")
        assert row["toolchain"]["device"] == gpu_machine.product
        if row["winner"] != "torch":
            assert row["time(us)"] < row["library_us"], "the library is never displaced by something slower"


def test_resuming_a_finished_run_is_quick(tuned: str, folder: Path) -> None:
    before = (folder / "out.yaml").read_bytes(), (folder / "out.yaml.journal").read_bytes()
    started = time.monotonic()
    status, out = run(*argv(folder))
    assert time.monotonic() - started <= 3
    assert status == 0 and "2 of 2 sizes are in" in out
    assert ((folder / "out.yaml").read_bytes(), (folder / "out.yaml.journal").read_bytes()) == before


def test_stored_results_are_right_and_can_be_timed_again(tuned: str, folder: Path, gpu_machine: Machine) -> None:
    stored = ("--gemm_size_file", str(folder / "out.yaml"), "-o", str(folder / "other.yaml"))
    status, out = run(*stored, "--compare_wo_tuning")
    assert status == 0 and "2 of 2 results are right" in out, out
    status, out = run(*stored, "--benchmark")
    assert status == 0 and out.count(" graph-events ") == 2, out
    status, out = run(*stored, "--benchmark", "--profiler", "events")
    assert status == 0 and out.count("graph-events") == 2, out


def test_the_winner_stands_alone(tuned: str, folder: Path) -> None:
    import importlib.util

    import torch

    (path,) = (folder / "out_kernels").glob("gemm_250_328_520*.py")
    spec = importlib.util.spec_from_file_location("winner", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    a = torch.randn(250, 520, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(328, 520, device="cuda", dtype=torch.bfloat16).T
    bias = torch.randn(328, device="cuda", dtype=torch.bfloat16)
    exact = a.double() @ b.double() + bias.double()
    error = (module.matmul(a, b, bias).double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-2


def test_another_architecture_is_compiled_without_running(tmp_path: Path, tuned: str) -> None:
    size = ("-m", "16", "-n", "16", "-k", "16", "--target", "gfx1100", "--budget", "1", "-o", str(tmp_path / "o.yaml"))
    status, out = run(*size, "--compile_only")
    assert status == 0 and ("compiling for gfx1100" in out)


def test_the_gpus_own_profiler_is_a_clock(folder: Path, gpu_machine: Machine) -> None:
    output = folder / "profiled.yaml"
    size = ("-m", "64", "-n", "1024", "-k", "2048", "-dtype_a", "bf16", "--budget", "40", "-o", str(output))
    status, out = run(*size, "--profiler", "auto", "--compare")
    assert status == 0, out
    (row,) = yaml.safe_load(output.read_text())
    own = {"nvidia": "cupti", "amd": "rocprofiler"}[gpu_machine.vendor]
    expected = own if registry.available(Timer, own) else "graph-events"
    assert row["timer"] == expected and 0 < row["time(us)"] < 1e4 and 0 < row["library_us"] < 1e4


@pytest.mark.parametrize(
    "kind",
    [
        "--batch 16",
        "--batch 16 --shared b",
        "--batch 16 --bias-vector n",
        "--batch 16 --family a8w8 -dtype_a fp8",
        "--family a8w8 -dtype_a fp8",
        "--family a8w8 -dtype_a fp8 --bias-vector n",
        "--family a8w8 -dtype_a int8 --libtype triton,torch",
    ],
)
def test_each_kind_is_tuned_beside_the_library(gpu_machine: Machine, tmp_path: Path, kind: str) -> None:
    if "fp8" in kind and gpu_machine.target.fp8 == "none":
        pytest.skip(f"{gpu_machine.product} has no fp8 units")
    out = tmp_path / "out.yaml"
    words = f"-m 33 -n 136 -k 528 -col_b --budget 30 -o {out} {kind}{'' if 'dtype' in kind else ' -dtype_a bf16'}"
    assert tune.main(words.split()) == 0
    (row,) = yaml.safe_load(out.read_text())
    assert row["timer"] == "graph-events" and row["error"] <= row["tolerance"]
    assert row.get("batch", 1) == (16 if "batch" in kind else 1)


# One product that takes most, one below the threshold, one that can't be computed, and a bias and a batch.
LOG = (
    line(m=4096, n=256, k=4096, count=100)
    + line("bench", m=64, n=16, k=64)
    + line(m=1024, n=512, k=1024, bias="true", count=50)
    + line(m=256, n=128, k=256, batch=8, count=50)
    + line(m=1024, n=512, k=1024, beta="1.0", count=10)
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, gpu_machine: Machine) -> Path:
    place = tmp_path_factory.mktemp("campaign")
    (place / "job.log").write_text(LOG)
    for stage in ("configs", "tune", "merge"):
        words = [str(place / "job.log"), "-o", str(place / "tunings"), "--only", stage, "--thr", "1"]
        assert optimize.main([*words, "--population", "8", "--generations", "2"]) == shell.DONE
    return place / "tunings"


def test_weights_are_measured(campaign: Path) -> None:
    with (campaign / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["baseline"] for row in rows].count("measured") == 4
    assert [row["note"] for row in rows if row["baseline"] == "roofline"] == ["its beta is 1; here it is 0"]
    assert rows[0]["problem"] == "256x4096x4096_bf16_TN" and float(rows[0]["% of total"]) > 30
    assert sum(float(row["% of total"]) for row in rows) == pytest.approx(100, abs=0.01)
    assert len((campaign / "baseline.journal").read_text().split()) > 4


def test_results_are_measured_and_verified(campaign: Path) -> None:
    rows = sizes.from_file(campaign / "merged.yaml", Defaults())
    assert {row.problem.key for row in rows} >= {"256x4096x4096_bf16_TN", "512x1024x1024_bf16_TN_biasn"}
    for row in rows:
        assert row.record is not None and row.record.timer != "model" and row.record.library_seconds
        assert row.record.error is not None and row.record.tolerance is not None
        assert row.record.error <= row.record.tolerance


def test_every_device_worked(campaign: Path, capsys: Capsys) -> None:
    for path in campaign.glob("tuned.yaml*"):
        path.unlink()
    words = ["-o", str(campaign), "--only", "tune", "--population", "8", "--generations", "2"]
    assert optimize.main(words) == shell.DONE
    reported = capsys.readouterr().err
    assert sum(one.startswith("device ") and " busy " in one for one in reported.splitlines()) == count_devices()


RAY_LOG = "".join(line(m=1024, n=n, k=2048, count=n) for n in (16, 64, 128, 256))


@pytest.fixture(scope="module")
def ray_cluster(gpu_machine: Machine) -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install tritongemm[ray]")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        cores = len(os.sched_getaffinity(0))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "num_gpus": count_devices()})
        yield cluster
        cluster.shutdown()


def test_a_campaign_on_all_gpus_of_a_cluster(ray_cluster: Any, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "job.log").write_text(RAY_LOG)
    words = [str(tmp_path / "job.log"), "-o", str(tmp_path / "tunings"), "--ray", ray_cluster.address]
    assert optimize.main([*words, "--population", "8", "--generations", "2"]) == shell.DONE
    reported = capsys.readouterr().err
    assert f" x {count_devices()} (" in reported and "of a Ray cluster" in reported
    assert sum(one.startswith("device ") and " busy " in one for one in reported.splitlines()) == count_devices()
    assert json.loads((tmp_path / "tunings" / "campaign.json").read_text())["done"] == list(STAGES)
    assert "time-weighted uplift" in reported


MOVED = [Problem(m, n, 512, *matrices("bf16", layout="TN")) for m in (32, 64, 200) for n in (256, 328)]
CONFIGS = [Config("tile", 32, 64, 64, 4, 1, 4, 3), Config("tile", 64, 64, 64, 4, 1, 4, 3)]


def test_all_gpus_repair(gpu_machine: Machine, tmp_path: Path, capsys: Capsys) -> None:
    target, tools = gpu_machine.target, {"triton": settings.version("triton"), "torch": settings.version("torch")}
    records = [
        Record(
            problem, target.name, CONFIGS[number % 2], "triton", 1e-3, 0.0, "graph-events",
            compute_units=target.compute_units, toolchain=tools, code="0" * 64,
        )
        for number, problem in enumerate(MOVED)
    ]  # fmt: skip
    path = tmp_path / "tuned.yaml"
    path.write_text(results_format().write(records), encoding="utf-8")
    assert check.main([str(path)]) == shell.WRONG
    assert f"{len(MOVED)} moved" in capsys.readouterr().out
    assert check.main([str(path), "--repair"]) == shell.DONE
    assert capsys.readouterr().out.count("repaired: ") == len(MOVED)
    assert check.main([str(path)]) == shell.DONE
    assert f"{len(MOVED)} holds" in capsys.readouterr().out


M, N, K = 16, 520, 1032


def test_results_serve_at_once(gpu_machine: Machine, tmp_path: Path) -> None:
    import torch

    seen: list[RunProgress] = []
    results = tritongemm.autotune([(M, N, K)], effort="quick", output=tmp_path / "out.yaml", progress=seen.append)
    (record,) = results
    assert not record.predicted and record.library_seconds and record.target == gpu_machine.target.name
    assert (seen[-1].done, seen[-1].total) == (1, 1) and "library us" in str(results)
    assert str(results.load()).startswith("1 of 1 rows serve")
    x, w = (torch.randn(rows, K, device="cuda", dtype=torch.bfloat16) for rows in (M, N))
    with torch.no_grad():
        assert tritongemm.explain(x, w).startswith(("exact", "library"))
        torch.testing.assert_close(tritongemm.mm(x, w), torch.nn.functional.linear(x, w), rtol=2e-2, atol=0.5)

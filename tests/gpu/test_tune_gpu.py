"""The command from end to end on a real GPU: measured beside the library, resumed, checked and timed again."""

import io
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tritongemm.cli import tune
from tritongemm.hip_ext.machine import Machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Timer

SIZES = "- {M: 16, N: 512, K: 1024, rowMajorB: N}\n- {M: 250, N: 328, K: 520, rowMajorB: N, bias: n}\n"


@pytest.fixture(scope="module")
def folder(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tuned")
    (made / "sizes.yaml").write_text(SIZES)
    return made


def run(*argv: str) -> tuple[int, str]:
    """Exit status, and all that was written."""
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
    """Screened by events, raced by the profiler; a result names the clock of the race."""
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

"""Family a8w8 on a real GPU: Triton's kernels against float64, and the libraries that scale rows and columns."""

from pathlib import Path

import pytest
import torch
import yaml

from tritongemm.cli import tune
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.machine import Machine
from tritongemm.numerics import verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend


@pytest.mark.parametrize(("dtype", "bias"), [("fp8", []), ("fp8", ["--bias-vector", "n"]), ("int8", [])])
def test_a_size_is_tuned_beside_the_library(
    gpu_machine: Machine, gpu_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bias: list[str]
) -> None:
    if dtype == "fp8" and gpu_machine.target.fp8 == "none":
        pytest.skip(f"{gpu_machine.product} has no fp8 units")
    monkeypatch.setenv("TRITONGEMM_CACHE", str(gpu_cache))
    out = tmp_path / "out.yaml"
    size = ["-m", "250", "-n", "336", "-k", "528", "-col_b", "--family", "a8w8", "-dtype_a", dtype, *bias]
    assert tune.main([*size, "--budget", "30", "--libtype", "triton,torch", "-o", str(out)]) == 0
    (row,) = yaml.safe_load(out.read_text())
    assert row["timer"] == "graph-events" and row["error"] <= row["tolerance"]


@pytest.mark.parametrize("name", ["torch", "blaslt"])
@pytest.mark.parametrize("bias", ["none", "n"])
def test_libraries_scale_rows_and_columns(gpu_machine: Machine, name: str, bias: str) -> None:
    encoding = {"fn": "fp8e4m3fn", "fnuz": "fp8e4m3fnuz"}.get(gpu_machine.target.fp8)
    reason = registry.available(Backend, name).reason
    if encoding is None or reason:
        pytest.skip(reason or "no fp8 units")
    family = registry.get(Family, "a8w8")
    problem = family.problem(Problem(96, 256, 512, *matrices(encoding, c="bf16", layout="TN"), bias=bias))
    operands = family.make_inputs(problem, "cuda")
    c = torch.empty(problem.m, problem.n, dtype=torch.bfloat16, device="cuda")
    backend = registry.get(LibraryBackend, name)
    configs = backend.list_algorithms(problem, operands | {"c": c}, 8)
    if not configs:
        pytest.skip(f"this version of {name} has no scales for each row and column")
    for config in configs:
        call = backend.operation(problem, operands | {"c": c}, config)
        assert call is not None, f"{name} lists {config.name} and can't call it"

        def run() -> None:
            call()  # noqa: B023
            torch.cuda.synchronize()

        found = verify.verify(problem, family, run, c, family.reference(problem, operands))
        assert found.ok, f"{config.name}: {found.reason}"

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import tritongemm
from tests.support.nouns import Backend, Defaults, Family, Machine, Patch, results_format
from tests.support.plugins import dropped, show_to_children
from tritongemm.cli import tune

BACKEND, FAMILY = "working_backend_toy", "family_toy"
SIZE = ["-m", "250", "-n", "336", "-k", "512", "--budget", "8"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: Patch) -> Iterator[str]:
    """A backend whose kernel computes, put beside the others, where child processes find it too."""
    with dropped(Backend, BACKEND, tmp_path, monkeypatch) as name:
        show_to_children(tmp_path, monkeypatch, Backend)
        yield name


def test_a_backend_races_and_serves(gpu_machine: Machine, backend: str, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    assert tune.main([*SIZE, "-col_b", "-dtype_a", "fp16", "--libtype", backend, "-o", str(out)]) == 0
    (row,) = yaml.safe_load(out.read_text())
    assert row["backend"] == backend and row["error"] <= row["tolerance"] and row["timer"] == "graph-events"
    (read,) = results_format().read(out, out.read_text(), Defaults())
    assert read.record is not None
    # Whichever won the race: the question is whether calls reach the backend's kernel.
    assert tritongemm.load([replace(read.record, winner=backend, tie=False)]) == 1
    x = torch.randn(250, 512, dtype=torch.float16, device="cuda")
    w = torch.randn(336, 512, dtype=torch.float16, device="cuda")
    torch.testing.assert_close(tritongemm.mm(x, w), x @ w.T, atol=5e-2, rtol=1e-2)
    said = tritongemm.explain(x, w)
    assert said.startswith("exact: ") and read.record.config.name in said


def test_a_family_with_its_own_scales_is_tuned(gpu_machine: Machine, tmp_path: Path, monkeypatch: Patch) -> None:
    out = tmp_path / "out.yaml"
    with dropped(Family, FAMILY, tmp_path, monkeypatch):
        show_to_children(tmp_path, monkeypatch, Family)
        assert tune.main([*SIZE, "--family", FAMILY, "-o", str(out)]) == 0
    (row,) = yaml.safe_load(out.read_text())
    assert (row["dtype_a"], row["dtype_b"], row["family"]) == ("fp16", "int8", FAMILY)
    assert row["timer"] == "graph-events" and 0 < row["error"] <= row["tolerance"]

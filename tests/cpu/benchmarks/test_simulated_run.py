"""benchmarks/simulated_run.py: a real run with waits for compilers and devices comes to its end, and is reported."""

import importlib
import sys
from pathlib import Path

import pytest


def test_a_run_of_two_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, sizes = importlib.import_module("simulated_run"), tmp_path / "sizes.yaml"
    sizes.write_text("- {M: 16, N: 16, K: 16}\n- {M: 33, N: 64, K: 32}\n")
    waits = [f"--{name}=0.001" for name in ("start", "plan", "compile", "listing", "algorithm", "screen", "race")]
    arguments = [str(sizes), "--devices=2", "--cores=2", "--algorithms=12", *waits]
    monkeypatch.setattr(sys, "argv", ["simulated_run.py", *arguments])
    script.main()
    said = capsys.readouterr().out
    assert "2 sizes on 2 devices: " in said and "99% of the final speed after " in said
    screened = int(said.partition(" kernels")[0].rpartition(" ")[2])
    assert 48 <= screened <= 2 * 128, "as many as guided search tries of each, fewer where they share binaries"

"""Results that moved race again on all of this machine's GPUs, and hold from then on."""

from pathlib import Path

import pytest

from tritongemm.cli import check, shell
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.formats import results_format
from tritongemm.hip_ext.machine import Machine
from tritongemm.system import settings

SIZES = [Problem(m, n, 512, *matrices("bf16", layout="TN")) for m in (32, 64, 200) for n in (256, 328)]
CONFIGS = [Config("tile", 32, 64, 64, 4, 1, 4, 3), Config("tile", 64, 64, 64, 4, 1, 4, 3)]


def test_all_gpus_repair(gpu_machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, tools = gpu_machine.target, {"triton": settings.version("triton"), "torch": settings.version("torch")}
    records = [
        Record(
            problem, target.name, CONFIGS[number % 2], "triton", 1e-3, 0.0, "graph-events",
            compute_units=target.compute_units, toolchain=tools, code="0" * 64,
        )
        for number, problem in enumerate(SIZES)
    ]  # fmt: skip
    path = tmp_path / "tuned.yaml"
    path.write_text(results_format().write(records), encoding="utf-8")
    assert check.main([str(path)]) == shell.WRONG
    assert f"{len(SIZES)} moved" in capsys.readouterr().out
    assert check.main([str(path), "--repair"]) == shell.DONE
    assert capsys.readouterr().out.count("repaired: ") == len(SIZES)
    assert check.main([str(path)]) == shell.DONE
    assert f"{len(SIZES)} holds" in capsys.readouterr().out

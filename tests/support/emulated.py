"""Executing launch plans on an emulated AMD GPU, where TRITONGEMM_EMULATOR names one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tritongemm.core import settings


def run(plan: Path, folder: Path) -> None:
    """Execute a plan, memory operations landing as late as the code allows, and compare with float64; skips the test
    where something is missing."""
    said = _executed(folder, lambda place, checkout: [str(place / "run_plan.py"), checkout, str(plan), "--late"])
    assert "races 0" in said
    assert "nan 0" in said


def run_scaled(folder: Path, *plans: Path) -> None:
    """Execute plans with scales and compare with float64; skips the test as `run` does."""
    script = str(Path(__file__).with_name("run_scaled_plan.py"))
    said = _executed(folder, lambda place, checkout: [script, str(place), checkout, *map(str, plans)])
    assert said.count("races 0") == len(plans)


def run_helpers(folder: Path, arch: str) -> None:
    """Execute the kernels that quantise, and those of mixtures of experts, and compare with PyTorch's operations."""
    script = str(Path(__file__).with_name("run_helpers.py"))
    said = _executed(folder, lambda place, checkout: [script, str(place), checkout, arch, str(folder / "cache")])
    assert "launches, races 0" in said


def _executed(folder: Path, arguments: Callable[[Path, str], list[str]]) -> str:
    """What the script that `arguments` begin with prints."""
    checkout = settings.emulator_checkout()
    if checkout is None or not checkout.is_dir():
        pytest.skip("no checkout for the emulator: TRITONGEMM_EMULATOR_CHECKOUT does not name one")
    emulator = settings.emulator_folder()
    if emulator is None or not emulator.is_dir():
        pytest.skip("no emulator: TRITONGEMM_EMULATOR does not name its folder")
    clang = next(filter(None, map(shutil.which, ("clang", *(f"clang-{v}" for v in range(22, 14, -1))))), None)
    if clang is None:
        pytest.skip("the emulator needs clang")
    shutil.copytree(emulator, folder / "emulator", dirs_exist_ok=True)  # it compiles itself beside its sources
    os.chmod(folder / "emulator", 0o755)
    command = [sys.executable, *arguments(folder / "emulator", str(checkout))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "CC": clang})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout

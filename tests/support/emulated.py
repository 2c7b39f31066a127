"""Executing launch plans on an emulated AMD GPU, where there is an emulator.

TRITONGEMM_EMULATOR names the folder of its program, run_plan.py; TRITONGEMM_EMULATOR_CHECKOUT the checkout of tinygrad
that it is built from.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.nouns import Config, KernelBackend, Launch, Problem, Target, registry
from tritongemm.export import launch_plans


@dataclass(frozen=True)
class Emulator:
    folder: Path
    checkout: Path
    clang: str


def find() -> Emulator | str:
    """Return the emulator, or what it lacks."""
    names = ("TRITONGEMM_EMULATOR", "TRITONGEMM_EMULATOR_CHECKOUT")
    folder, checkout = (Path(os.environ.get(name) or "/nowhere") for name in names)
    clang = next(filter(None, map(shutil.which, ("clang", *(f"clang-{v}" for v in range(22, 14, -1))))), None)
    if clang and folder.is_dir() and checkout.is_dir():
        return Emulator(folder, checkout, clang)
    return f"the emulator needs {names[0]}, {names[1]} and clang"


def run(plan: Path, folder: Path) -> None:
    """Execute a plan, memory operations landing as late as the code allows, and compare with float64.

    Like the functions below it does nothing without an emulator: tests of nothing else are marked ``emulator``.
    """
    said = _executed(folder, lambda place, checkout: [str(place / "run_plan.py"), checkout, str(plan), "--late"])
    assert said is None or ("races 0" in said and "nan 0" in said)


def run_scaled(folder: Path, *plans: Path) -> None:
    """Execute plans with scales and compare with float64."""
    script = str(Path(__file__).with_name("run_scaled_plan.py"))
    said = _executed(folder, lambda place, checkout: [script, str(place), checkout, *map(str, plans)])
    assert said is None or said.count("races 0") == len(plans)


def run_configs(folder: Path, problem: Problem, configs: Sequence[Config], target: Target) -> None:
    """Compile configs of Triton's, none of which may spill, and execute the plans of their launches."""
    triton, plans = registry.get(KernelBackend, "triton"), list[Path]()
    for config in configs:
        assert triton.check(config, problem, target), config.name
        built, code, _ = triton.compile(triton.compile_job(config, problem, target))
        assert built.status == "ok" and not built.spills, config.name
        binary = folder / f"{len(plans)}.hsaco"
        binary.write_bytes(code)
        launch = triton.launch(replace(built, path=str(binary)), problem, target)
        assert isinstance(launch, Launch)
        plans.append(binary.with_suffix(".json"))
        plans[-1].write_text(json.dumps({**launch_plans.plan(launch, problem, target), "object": binary.name}))
    run_scaled(folder, *plans)


def run_helpers(folder: Path, arch: str) -> None:
    """Execute the kernels that quantise, and those of mixtures of experts, and compare with PyTorch's operations."""
    script = str(Path(__file__).with_name("run_helpers.py"))
    said = _executed(folder, lambda place, checkout: [script, str(place), checkout, arch, str(folder / "cache")])
    assert said is None or "launches, races 0" in said


def _executed(folder: Path, arguments: Callable[[Path, str], list[str]]) -> str | None:
    """What the script that `arguments` begin with prints; None without an emulator."""
    emulator = find()
    if isinstance(emulator, str):
        return None
    shutil.copytree(emulator.folder, folder / "emulator", dirs_exist_ok=True)  # it compiles itself beside its sources
    os.chmod(folder / "emulator", 0o755)
    command = [sys.executable, *arguments(folder / "emulator", str(emulator.checkout))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "CC": emulator.clang})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout

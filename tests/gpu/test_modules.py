"""Generated modules on a real GPU as another machine has them: where this package is not, with torch and Triton alone.

They are run as programs and imported; results are compared with float64.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.here import needs_gpu
from tests.support.module_cases import CASES
from tests.support.nouns import Backend, Config, Family, Machine, Problem, Record, Target, registry
from tritongemm.codegen import modules
from tritongemm.numerics.grouped import written
from tritongemm.numerics.verify import deviation

pytestmark = needs_gpu
CONFIGS_OF_A_PROCESS = 4  # each is compiled four times
# Imports the modules of its folder, and multiplies the operands that are beside each of them.
OTHER_USER = """
import importlib, pathlib, sys, torch
sys.modules["tritongemm"] = None  # importing it is refused
for path in sorted(pathlib.Path().glob("*.operands")):
    module, results = importlib.import_module(path.stem), []
    for operands in torch.load(path, map_location="cuda"):
        if hasattr(module, "matmul"):
            results.append({"matmul": module.matmul(**{k: v for k, v in operands.items() if k != "c"})})
        else:
            results.append({name: module.launch(name, **operands).clone() for name in module.CONFIGS})
    torch.save(results, path.with_suffix(".results"))
"""


def sizes_of(problem: Problem, winner: bool) -> list[Problem]:
    """A row, an odd number as a view, and many rows for a winner; for candidates a row, and the tuned M as a view."""
    if problem.groups is not None:
        return [problem]
    # The copy engine wants columns of A to begin at multiples of 16 bytes.
    one, odd = (1, 97) if problem.a.row_major else (8, 104)
    return [problem.at(m) for m in ((one, odd, 1000) if winner else (one, problem.m))]


def operands_of(problem: Problem, view: bool) -> dict[str, Any]:
    """Operands, and a C that is spoiled; with `view`, A's rows are halves of longer ones."""
    operands = registry.get(Family, problem.family).make_inputs(problem, "cpu")
    if view and problem.a.row_major:
        a = operands["a"]
        operands["a"] = torch.cat((a.view(torch.uint8), a.view(torch.uint8)), -1).view(a.dtype)[..., : a.shape[-1]]
    c = torch.full(problem.operands["c"].extents, float("nan")).to(getattr(torch, problem.c.type.torch))
    return operands | {"c": c}


def write(problem: Problem, configs: list[Config], target: Target, folder: Path) -> dict[str, list[Problem]]:
    """Modules and their operands; the sizes that each is asked for, by its name."""
    folder.mkdir()
    asked = {}
    candidates = modules.write_candidates(problem, [replace(c, group_m=1) for c in configs], target, folder)
    asked[candidates.stem] = sizes_of(problem, winner=False)
    for number, config in enumerate(configs):
        record = Record(problem, target.name, config, "triton", 1e-5, 0.0, "events")
        path = modules.write_winner(record, target, folder).rename(folder / f"winner{number}.py")
        asked[path.stem] = sizes_of(problem, winner=True)
    for name, sizes in asked.items():
        made = [operands_of(size, view=number == 1) for number, size in enumerate(sizes)]
        torch.save(made, folder / f"{name}.operands")
    (folder / "other.py").write_text(OTHER_USER)
    return asked


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A process that knows nothing of this package."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "TRITON_CACHE_DIR": str(folder / "cache")
    }
    command = [sys.executable, *argv]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)


def faults(case: str, configs: list[Config], target: Target, folder: Path) -> Iterator[str]:
    problem = CASES[case].problem
    family = registry.get(Family, problem.family)
    asked = write(problem, configs, target, folder)
    program = run([f"{next(iter(asked))}.py"], folder)
    if program.returncode != 0:
        yield f"{case}: run as a program: {program.stdout[-3000:]}\n{program.stderr[-1000:]}"
    imported = run(["other.py"], folder)
    if imported.returncode != 0:
        yield f"{case}: imported, configs {[c.name for c in configs]}: {imported.stderr[-3000:]}"
        return
    for name, sizes in asked.items():
        operands, results = (
            torch.load(folder / f"{name}.{kind}", map_location="cpu") for kind in ("operands", "results")
        )
        for size, given, found in zip(sizes, operands, results, strict=True):
            reference = family.reference(size, {k: v for k, v in given.items() if k != "c"})
            for config, c in found.items():
                error = deviation(*written(size, c, reference))
                if not error <= family.tolerance(size):
                    which = configs[int(name[6:])].name if name.startswith("winner") else config
                    yield f"{case}: {name} {which} at {size.key}: error {error:.3g}"


def test_modules_are_right_where_this_package_is_not(gpu_machine: Machine, tmp_path: Path) -> None:
    target, backend = gpu_machine.target, registry.get(Backend, "triton")
    jobs: list[tuple[str, list[Config]]] = []
    for case, (problem, listed, _) in CASES.items():
        configs = [c for c in dict.fromkeys(listed) if backend.check(c, problem, target)]
        step = CONFIGS_OF_A_PROCESS
        jobs += [(case, configs[i : i + step]) for i in range(0, len(configs), step)]
    assert {c.template for _, configs in jobs for c in configs} >= {
        "tile",
        "gemv",
        "stream_k",
        "grouped",
        "grouped_tile",
    }
    folders = [tmp_path / f"other{number}" for number in range(len(jobs))]
    with ThreadPoolExecutor(min(len(jobs), max(1, (os.cpu_count() or 1) - 2))) as pool:
        found = list(pool.map(lambda job, folder: list(faults(job[0], job[1], target, folder)), jobs, folders))
    assert not [fault for one in found for fault in one]

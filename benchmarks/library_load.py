"""What a library of kernels costs: seconds to build it, to load it in a new process, to call it first, to check it.

    python benchmarks/library_load.py [--kernels 200]

Its kernels are real, each of a size and a binary of its own; nothing is tuned. The process that loads it has no Triton.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import command_environment

from tritongemm.build import prepare
from tritongemm.core.artifact import CompileJob
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.export.library import building, writing
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.plugins.validity import check_config
from tritongemm.system import settings

M = 64  # rows of every call
_AXES = (16, 32, 64, 128), (32, 64, 128), (64, 32, 128), (4, 8), (2, 3, 4)  # M, N and K of tiles, warps, stages
_WIDTHS = (0, 8, 4)  # columns beside a multiple of 64: what N is divided by makes another binary
LOAD = """
import sys, time
from pathlib import Path
sys.modules["triton"] = None
import torch
torch.zeros(1, device="cuda")
started = time.perf_counter()
import tritongemm
from tritongemm.export.library.storage import open_library
count = tritongemm.load(sys.argv[1])
loaded = time.perf_counter()
sizes = [entry.record.problem for entry in open_library(Path(sys.argv[1])).entries]
mine = [p for p in sizes if p.family == "dense" and p.kind == "one"]
operands = [(torch.randn(p.m, p.k, device="cuda").bfloat16(), torch.randn(p.n, p.k, device="cuda").bfloat16())
            for p in mine]
torch.cuda.synchronize()
began = time.perf_counter()
for number, (x, w) in enumerate(operands):
    y = tritongemm.mm(x, w)
    if not number:
        torch.cuda.synchronize()
        first = time.perf_counter() - began
torch.cuda.synchronize()
each = (time.perf_counter() - began) / len(operands)
exact = x.double() @ w.double().T
assert (y.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
served = sum(tritongemm.explain(*pair).startswith("exact") for pair in operands)
assert served == len(operands), f"{len(operands) - served} calls were not served"
print(f"load of {count} results: {1e3 * (loaded - started):.0f} ms, beside PyTorch's import")
print(f"first call: {1e3 * first:.1f} ms; first calls of {len(operands)} kernels: {1e3 * each:.2f} ms each")
print(f"load and first call: {loaded - started + first:.3f} s; "
      f"load and first calls of {len(operands)} kernels: {loaded - started + each * len(operands):.3f} s")
"""


def records(target: Target, count: int) -> list[Record]:
    """Results of `count` sizes, each of which has a kernel that no other has; most are of linear layers in bf16."""
    found: dict[str, Record] = {}
    fp8 = {"fn": "fp8e4m3fn", "fnuz": "fp8e4m3fnuz"}.get(target.fp8)
    for number, config in enumerate(_configs()):
        problem = _problem(number, fp8)
        if len(found) < count and check_config(config, problem, target, target.name):
            job = prepare.or_refusal(lambda p=problem, c=config: prepare.compile_job(p, c, target))
            if isinstance(job, CompileJob):
                found.setdefault(job.digest, _record(problem, config, target))
    return list(found.values())


def _configs() -> Iterator[Config]:
    """Tiles that fit into any GPU's shared memory."""
    for m, n, k, warps, stages in itertools.product(*_AXES):
        if (m + n) * k * 2 * stages <= 48 << 10 and m * n >= 32 * 32 * warps // 4:
            yield from [Config("tile", m, n, k, 1, 1, warps, stages)] * len(_WIDTHS)


def _problem(number: int, fp8: str | None) -> Problem:
    n, k = 512 + 64 * (number % 29) + _WIDTHS[number % len(_WIDTHS)], 512 + 128 * (number // 29)
    if fp8 is not None and number % 10 == 9:
        scaled: Problem = registry.get(Family, "a8w8").problem(Problem(M, n, k, *matrices(fp8, c="bf16", layout="TN")))
        return scaled
    return Problem(M, n, k, *matrices("bf16", layout="TN"), batch=4 if number % 10 == 8 else 1)


def _record(problem: Problem, config: Config, target: Target) -> Record:
    tools = {"triton": settings.version("triton")}
    return Record(
        problem, target.name, config, "triton", 1e-6, 0.0, "events", compute_units=target.compute_units, toolchain=tools
    )


def build(path: Path, count: int, here: machine.Machine) -> None:
    """Write a library of `count` kernels, and print what that took."""
    started = time.perf_counter()
    made = building.build(records(here.target, count), here)
    contents = writing.Contents()
    writing.merge(contents, made.entries, made.readers())
    writing.add_beside(contents, made.helpers, made.targets, made.readers())
    with writing.held(path):
        writing.write(path, contents)
    seconds, size = time.perf_counter() - started, path.stat().st_size / 1e6
    print(
        f"build of {len(made.entries)} kernels and {len(made.helpers)} helper kernels: {seconds:.1f} s, {size:.1f} MB"
    )
    for record, reason in made.left_out:
        print(f"left out: {record.config.name}: {reason}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=200, help="how many the library has")
    args = parser.parse_args()
    here = machine.find_machine(None)
    if not here.devices:
        sys.exit("this needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITONGEMM_CACHE"] = f"{folder}/cache"
        path = Path(folder) / "library.zip"
        build(path, args.kernels, here)
        for name, words in (
            ("the process that loads it", [sys.executable, "-c", LOAD, str(path)]),
            ("check", [sys.executable, "-m", "tritongemm", "check", str(path)]),
        ):
            for cache in ("cache", "empty cache"):
                print(f"{name}, {cache}: {_run(words, Path(folder), cache):.2f} s with its imports")


def _run(words: list[str], folder: Path, cache: str) -> float:
    """The seconds that a process takes, whose last lines are printed."""
    environment = command_environment(TRITONGEMM_CACHE=str(folder / cache))
    started = time.perf_counter()
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    seconds = time.perf_counter() - started
    print(*done.stdout.splitlines()[-3:], *done.stderr.splitlines()[-3:], sep="\n")
    return seconds


if __name__ == "__main__":
    main()

"""How fast the tuner itself is, on this machine's GPU: compiles and screens a second, complete runs, and a resume.

    python benchmarks/throughput.py [--json OUT] [stages full eight]

Every figure comes from the command line or its own stages with a cold cache in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from _common import command_environment, open_gpu

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend
from tritongemm.search import planner

PARTS = ("stages", "full", "eight")
LLAMA_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def stages(folder: Path, here: machine.Machine) -> dict[str, float]:
    """1000 configs of 4096 x 4096 x 4096 compiled cold, then 1000 of a short kernel screened."""
    backend = registry.get(SearchedBackend, "triton")
    compiler = BuildPool(ArtifactCache(folder / "stages"))
    figures: dict[str, float] = {}
    for name, problem in (
        ("compile", Problem(4096, 4096, 4096, *matrices(layout="TN"))),
        ("screen", Problem(16, 1280, 8192, *matrices("bf16", layout="TN"))),
    ):
        planned = planner.plan_search(problem, here.target, folder, backend.name)
        order = planned.order.configs[:1000]
        jobs = [backend.compile_job(c, problem, here.target) for c in order]
        started = time.perf_counter()
        by_digest = {b.digest: b for b in compiler.stream(jobs)}
        seconds = time.perf_counter() - started
        figures[f"{name}: seconds to compile {len(jobs)} configs, {len(by_digest)} binaries, cold"] = seconds
        built = [replace(by_digest[j.digest], config=j.config) for j in jobs if by_digest[j.digest].status == "ok"]
        if name == "screen":
            gpu = open_gpu(here)
            list(gpu.screen(problem, built[:1], float("inf")))  # the process and the operands are there
            started = time.perf_counter()
            trials = [t for t in gpu.screen(problem, built, float("inf")) if t.status == "ok"]
            seconds = time.perf_counter() - started
            figures["screen: fastest kernel, us"] = min(t.seconds for t in trials) * 1e6
            figures["screen: configs a second"] = len(trials) / seconds
            gpu.close()
    compiler.close()
    return figures


def run(folder: Path, *arguments: str) -> float:
    """The seconds that one tuning command takes."""
    environment = command_environment(TRITONGEMM_CACHE=str(folder / "cache"))
    started = time.perf_counter()
    command = [sys.executable, "-m", "tritongemm.tune", *arguments]
    subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def screened(journal: Path) -> int:
    """Configs whose first trial is in a journal."""
    lines = (json.loads(line) for line in journal.read_text().splitlines())
    return sum(line.get("trial", {}).get("stage") == "screen" for line in lines)


def full(folder: Path) -> dict[str, float]:
    """4096 x 4096 x 4096 fp16 over its complete pruned space: compile, time and verify."""
    seconds = run(folder, "-m", "4096", "-n", "4096", "-k", "4096", "-o", "full.yaml", "--strategy", "exhaustive")
    count = screened(folder / "full.yaml.journal")
    figures = {"full: configs": count, "full: seconds": seconds, "full: configs a second": count / seconds}
    again = run(folder, "-m", "4096", "-n", "4096", "-k", "4096", "-o", "full.yaml", "--strategy", "exhaustive")
    return {**figures, "resume: seconds of a finished run": again}


def eight(folder: Path) -> dict[str, float]:
    """Eight sizes of one model, 1000 configs each."""
    rows = [f"- {{M: {m}, N: {n}, K: {k}, rowMajorB: N}}" for m in (16, 1024) for n, k in LLAMA_8B]
    (folder / "eight.yaml").write_text("\n".join(rows) + "\n")
    options = ("--strategy", "exhaustive", "--budget", "1000", "-dtype_a", "bf16", "-o", "eight_out.yaml")
    seconds = run(folder, "--gemm_size_file", "eight.yaml", *options)
    return {"eight: configs": screened(folder / "eight_out.yaml.journal"), "eight: seconds": seconds}


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument("--json", metavar="OUT", help="write the figures here as well")
    args = parser.parse_args()
    if unknown := set(args.what) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(PARTS)}")
    here = machine.find_machine(None)
    if not here.devices:
        print("needs a GPU", file=sys.stderr)
        return 2
    figures: dict[str, float] = {}
    print(f"{here.product}, {len(os.sched_getaffinity(0))} cores", flush=True)
    for name in args.what or PARTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            found = stages(folder, here) if name == "stages" else {"full": full, "eight": eight}[name](folder)
        figures |= found
        for label, value in found.items():
            print(f"{label:<56} {value:10.2f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"device": here.product, **figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What thousands of stored results cost: to read them, to load them for serving, and to find a run of them finished.

    python benchmarks/many_rows.py [--rows N] [--folder DIR] [--json OUT]

Needs no GPU. Times are seconds of CPU of a process of its own, so that other work on the machine counts little: `read`
and `load` from the call to its return, `command` of the entire process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from itertools import islice, product
from pathlib import Path

from _common import command_environment

from tritongemm.codegen.render import module_name
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.trial import PREDICTED, Trial
from tritongemm.hip_ext import machine
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.results.store import Store
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space

TARGET = "gfx942"
TRIALS = 12  # Trials of a size in the journal; its record is one more line.
WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1280, 8192), (8192, 1024), (7168, 8192)]
COMMAND = ["--gemm_size_file=sizes.yaml", "-o=done.yaml", f"--target={TARGET}", "-dtype_a=bf16", "-dtype_c=bf16"]

READ = "from tritongemm.workloads.sizes import Defaults, from_file; act = lambda: from_file(Path(argv[1]), Defaults())"
LOAD = "import tritongemm; from tritongemm.serving import api; act = lambda: api.load(argv[1])"
TIMED = """
import time
from pathlib import Path
from sys import argv
{}
started = time.process_time()
act()
print(time.process_time() - started)
"""


def make_problems(count: int) -> list[Problem]:
    """`count` sizes of linear layers; one of four has int8 operands with scales."""
    a8w8 = registry.get(Family, "a8w8")
    problems = []
    for number, (m, (n, k)) in enumerate(islice(product(range(1, count + 1), WEIGHTS), count)):
        if number % 4 == 3:
            problems.append(a8w8.problem(Problem(m, n, k, *matrices("int8", c="bf16", layout="TN"))))
        else:
            problems.append(Problem(m, n, k, *matrices("bf16", layout="TN")))
    return problems


def write_results(folder: Path, problems: list[Problem]) -> None:
    """The files of a finished run of these problems: sizes.yaml, done.yaml, its journal, and empty modules."""
    here = machine.find_machine(TARGET)
    typical = Problem(4096, 4096, 4096, *matrices("bf16", layout="TN"))
    configs = prune(space(typical, here.target), typical, here.target).kept
    toolchain = machine.toolchain(here)
    (modules := folder / "done_kernels").mkdir()
    sizes = []
    with Store.open(
        folder / "done.yaml", TARGET, toolchain, {"timer": PREDICTED}, compute_units=here.target.compute_units
    ) as store:
        for number, problem in enumerate(problems):
            tried = [configs[(7 * number + other) % len(configs)] for other in range(TRIALS)]
            trials = [make_trial(problem, config, 1 + place / 10) for place, config in enumerate(tried)]
            best = trials[0]
            seconds = best.seconds
            store.add_trials(problem, trials, Record(
                problem, TARGET, best.config, "triton", seconds, 0.0, PREDICTED, 1e-3, 2e-3,
                verified="2 launches in the interpreter at 128x128x64", toolchain=toolchain,
                compute_units=here.target.compute_units,
            ))  # fmt: skip
            winner = modules / f"{module_name(problem).replace('generated_kernel', 'gemm')}.py"
            winner.write_text("# A run writes the winner here, and asks whether it is there.\n")
            family = "" if problem.family == "dense" else f", family: {problem.family}, dtype_a: int8, dtype_b: int8"
            sizes.append(f"- {{M: {problem.m}, N: {problem.n}, K: {problem.k}, rowMajorB: N{family}}}\n")
        store.merge(problems)
    (folder / "sizes.yaml").write_text("".join(sizes))


def make_trial(problem: Problem, config: Config, factor: float) -> Trial:
    """A trial as a machine without a GPU makes it."""
    seconds = factor * (problem.flops / 1.3e15 + problem.bytes / 5.3e12)
    return Trial(config, "ok", samples=(seconds,), timer=PREDICTED)


def cpu_seconds(folder: Path, *command: str) -> tuple[float, str]:
    """The CPU seconds that a Python command takes in a folder, and what it prints."""
    environment = command_environment(TRITONGEMM_CACHE=str(folder / "cache"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], check=True, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure(folder: Path, count: int) -> dict[str, float]:
    """The figures of `count` rows, whose files are made in an empty folder, or are there already."""
    if not (folder / "sizes.yaml").exists():
        write_results(folder, make_problems(count))
    figures = {}
    for name, what in (("read", READ), ("load", LOAD)):
        figures[name] = float(cpu_seconds(folder, "-c", TIMED.format(what), "done.yaml")[1])
    figures["command"], said = cpu_seconds(folder, "-m", "tritongemm.tune", *COMMAND)
    if said.count("\n") < count:
        raise SystemExit(f"the finished run printed {said.count(chr(10))} lines for {count} sizes")
    return figures


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000, metavar="N", help="results in the file (default %(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the files here, or use those that are here")
    parser.add_argument("--json", metavar="OUT", help="write the figures here as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(folder.resolve(), args.rows)
    for name, seconds in figures.items():
        print(f"{name}: seconds of CPU for {args.rows} rows {seconds:10.2f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": args.rows, **figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How well tables over M serve M that were never measured, and what making them costs; on one GPU.

    python benchmarks/m_tables.py [--products 6144x4096,2112x7168] [--m-range 1-2048] [--held-out 14] [--folder F]

Tables are made with an empty cache. Then M that they have not measured, spread evenly over the powers of two, are each
tuned as a size of its own. Last, in one race at each of these M: what the table serves, what its own tuning found, and
PyTorch. All is bf16, x[M, K] @ w[N, K].T. A run that was stopped goes on where it was if it has the same --folder,
where races.jsonl has all times: of the row's kernel too where the table lets PyTorch serve.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from _common import command_environment, open_gpu

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.build.prepare import brings_kernels, compile_job
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.core.trial import BASELINE_ENTRY
from tritongemm.hip_ext import machine
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.serving.record_table import RecordTable
from tritongemm.tune.m_table import library_serves
from tritongemm.workloads import sizes

LIBRARY = "torch"


def tune(folder: Path, name: str, problems: list[Problem], *options: str) -> tuple[list[Record], float]:
    """The records of one tuning command, and the seconds that it took."""
    rows = "".join(f"- {{M: {p.m}, N: {p.n}, K: {p.k}}}\n" for p in problems)
    (folder / f"{name}_sizes.yaml").write_text(rows, encoding="utf-8")
    command = [sys.executable, "-m", "tritongemm.tune", "-col_b", "-dtype_a", "bf16", "-o", f"{name}.yaml", *options]
    command += ["--gemm_size_file", f"{name}_sizes.yaml"]
    started = time.perf_counter()
    environment = command_environment(TRITONGEMM_CACHE=str(folder / "cache"))
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)
    seconds = time.perf_counter() - started
    print(*(line for line in (folder / f"{name}.log").read_text(encoding="utf-8").splitlines() if "held-out" in line))
    found = sizes.from_file(folder / f"{name}.yaml", Defaults())
    return [row.record for row in found if row.record is not None], seconds


def unmeasured(product: Problem, records: list[Record], low: int, high: int, count: int, seed: int) -> list[Problem]:
    """M that no record was measured at, spread evenly over the powers of two."""
    known = {r.problem.m for r in records if r.problem.at(1) == product.at(1)}
    generator, found = random.Random(f"{seed} {product.n} {product.k}"), dict[int, None]()
    while len(found) < count:
        place = (len(found) + generator.random()) / count
        m = round(low * (high / low) ** place) if len(found) < count else 0
        while m in known or m in found:
            m += 1
        found[min(m, high)] = None
    return [product.at(m) for m in sorted(found) if m not in known]


def race(gpu: GpuEvaluator, pool: BuildPool, problem: Problem, configs: list[Config]) -> dict[str, float]:
    """Median seconds of each config, and of the library, in one race."""
    artifacts: list[Artifact] = []
    for config in dict.fromkeys(configs):
        job = compile_job(problem, config, gpu.target) if brings_kernels(config) else None
        if isinstance(job, Support):
            raise SystemExit(f"{problem.key}: {config.name}: {job}")
        artifacts += [Artifact(config, "")] if job is None else [replace(a, config=config) for a in pool.stream([job])]
    result = gpu.race(problem, artifacts, LIBRARY)
    return {name: median(samples) for name, samples in result.samples.items()}


def main() -> None:
    """Make the tables, tune M that they have not measured, and race them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default="6144x4096,2112x7168,4096x14336")
    parser.add_argument("--m-range", default="1-2048")
    parser.add_argument("--held-out", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="results stay there; default: they are deleted")
    args = parser.parse_args()
    low, high = map(int, args.m_range.split("-"))
    products = [
        Problem(1, *map(int, text.split("x")), *matrices("bf16", layout="TN")) for text in args.products.split(",")
    ]
    here = machine.find_machine(None)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        table, table_s = tune(folder, "table", products, "--m_range", args.m_range)
        held = [p for product in products for p in unmeasured(product, table, low, high, args.held_out, args.seed)]
        each, each_s = tune(folder, "each", held)
        served, tuned = RecordTable(table), {r.problem: r for r in each}
        gpu, pool = open_gpu(here), BuildPool(ArtifactCache(folder / "cache"))
        print(f"{'size':<28} {'served us':>9} {'tuned us':>9} {'torch us':>9} {'regret':>7} {'share':>6}  serves")
        regrets, shares = list[float](), list[float]()
        for problem in held:
            mine, own = served.find(problem, here.target.name, here.target.compute_units), tuned[problem]
            if isinstance(mine, Support):
                print(f"{problem.key:<28} {mine}")
                continue
            times = race(gpu, pool, problem, [r.config for r in (mine, own)])
            with (folder / "races.jsonl").open("a", encoding="utf-8") as out:
                served_by, best = ([r.config.name, library_serves(r)] for r in (mine, own))
                print(json.dumps({"size": problem.key, "row": served_by, "own": best, "seconds": times}), file=out)
            seconds = [times[BASELINE_ENTRY if library_serves(r) else r.config.name] for r in (mine, own)]
            regrets.append(seconds[0] / seconds[1] - 1)
            shares.append(times[BASELINE_ENTRY] / seconds[0])
            us = [f"{s * 1e6:9.2f}" for s in (*seconds, times[BASELINE_ENTRY])]
            what = LIBRARY if library_serves(mine) else mine.config.short_name
            print(f"{problem.key:<28} {' '.join(us)} {regrets[-1]:7.1%} {shares[-1]:6.3f}  {mine.m_from}: {what}")
        gpu.close()
        pool.close()
    ordered = sorted(regrets)
    tenth = ordered[int(0.9 * (len(ordered) - 1))]
    print(f"tables: {table_s:.1f} s, {len(table)} rows; {len(held)} sizes of their own: {each_s:.1f} s")
    print(
        f"regret against tuning that M: {fmean(regrets):.1%} on average, {tenth:.1%} at the 90th percentile, "
        f"{ordered[-1]:.1%} at worst"
    )
    mean = math.exp(fmean(map(math.log, shares)))
    print(f"of torch: {mean:.3f} (geometric mean), {min(shares):.3f} at least")


if __name__ == "__main__":
    main()

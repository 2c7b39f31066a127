"""Best config per template for fp8 with block scales (or --scales row): compile, screen and verify on this GPU.

    PYTHONPATH=. python .dev-kern/bs.py [--scales block|row] [--nk 2112x7168,...] [--m 1,16,64,...] [--top 16] [--jobs 16]
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from tempfile import mkdtemp
from pathlib import Path

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, SearchedBackend
from tritongemm.runtime import machine
from tritongemm.search.cost_model import model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

NK = "2112x7168,7168x2048,4096x7168,24576x1536,7168x16384"


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--scales", default="block")
    p.add_argument("--nk", default=NK)
    p.add_argument("--m", default="1,16,64,128,256,1024,4096")
    p.add_argument("--top", type=int, default=16)
    p.add_argument("--jobs", type=int, default=16)
    a = p.parse_args()
    found = machine.find_machine(None)
    target, triton = found.target, registry.get(SearchedBackend, "triton")
    family = registry.get(Family, "a8w8_blockscale" if a.scales.startswith(("block", "group")) else "a8w8")
    sizes = [(int(m), *map(int, nk.split("x"))) for nk in a.nk.split(",") for m in a.m.split(",")]
    problems = [family.problem(*s, "fp8e4m3fn", "fp8e4m3fn", "bf16", row_major_b=False, scales=a.scales) for s in sizes]
    wanted, jobs = {}, {}
    for problem in problems:
        groups = defaultdict(list)
        for c in model.rank(prune.prune(space(problem, target), problem, target).kept, problem, target).configs:
            key = (c.template, c.tile, c.split_k, c.num_warps, c.option("swap_ab"), c.option("share"))
            if sum(1 for k in groups[c.template] if k[0] == key) < 2 and len(groups[c.template]) < a.top:
                groups[c.template].append((key, c))
        wanted[problem] = [c for g in groups.values() for _, c in g]
        for c in wanted[problem]:
            job = triton.compile_job(c, problem, target)
            jobs[job.digest] = job
            wanted[problem][wanted[problem].index(c)] = (c, job.digest)
    print(f"{len(jobs)} kernels for {len(problems)} sizes", flush=True)
    pool = BuildPool(ArtifactCache(Path(mkdtemp())), a.jobs)
    built = {b.digest: b for b in pool.stream(jobs.values())}
    pool.close()
    for b in built.values():
        if b.status != "ok" or b.spills:
            print(f"  {b.config.name}: {b.status} {b.reason} spills {b.spills}")
    gpu = GpuEvaluator(target, found.vendor, found.devices[0], MeasureProtocol(), timeout_s=60.0)
    for problem in problems:
        from dataclasses import replace

        artifacts = [replace(built[d], config=c) for c, d in wanted[problem] if built[d].status == "ok"]
        best = {}
        for trial in gpu.screen(problem, artifacts, float("inf")):
            if trial.status != "ok":
                print(f"    {trial.config.name}: {trial.status} {trial.reason}")
                continue
            us = min(trial.samples) * 1e6
            if trial.config.template not in best or us < best[trial.config.template][0]:
                best[trial.config.template] = us, trial.config
        order = sorted(best.values(), key=lambda pair: pair[0])
        checks = {t.config: t for t in gpu.verify(problem, [x for x in artifacts if x.config in {c for _, c in order}])}
        print(f"{problem.n}x{problem.k} M={problem.m}")
        for us, c in order:
            t = checks[c]
            print(f"   {us:8.2f} us  {c.name}  {t.status} error {t.error:.2e}" if t.error is not None else f"   {us:8.2f} {c.name} {t.status} {t.reason}", flush=True)
    gpu.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

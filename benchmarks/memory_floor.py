"""How much of a tuned time is the memory's: the fastest read of the same weights, by the protocol of the tuner.

    python benchmarks/memory_floor.py RESULTS.yaml [--json OUT]

A GEMM of few rows is bound by reading its weights once. The floor is the best of several kernels that read B, whole and
once, and do nothing else: launched through the same captured graph, over the same rotation of copies, timed by the same
timer. The last column is floor over tuned time: 1.00 means that nothing but faster memory helps.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from statistics import median

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tritongemm import machine, sizes
from tritongemm.hip_ext import driver
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.workbench import Protocol, Request, Workbench

FEW = 64  # rows of A up to which reading B is most of the work
ROUNDS = 15


@triton.jit
def read(b_ptr, out_ptr, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.range(BLOCKS, num_stages=STAGES):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(b_ptr + at, mask=at < count, other=0)
    # Never true of random data, which the compiler can't know: the loads stay, and nothing is written.
    if tl.sum(total) == 0x7FFFFFF1:
        tl.store(out_ptr, 1)


def _words(problem: Problem) -> bool:
    """Whether rows of B as they lie in memory are whole words of 32 bits."""
    return (problem.n if problem.row_major_b else problem.k) * problem.b.bytes % 4 == 0


def floor(problem: Problem, here: machine.Machine, protocol: Protocol) -> float:
    """Seconds of the fastest read of B."""
    device = driver.open(here.vendor).device(here.devices[0])
    stream = torch.cuda.Stream()
    request = Request("screen", problem, here.target, protocol, here.vendor, here.devices[0], ())
    out, times = torch.zeros(1, dtype=torch.int32, device="cuda"), []
    with torch.cuda.stream(stream):
        bench = Workbench(request, device, stream.cuda_stream)
        torch.cuda.synchronize()
        weights = [s["b"] for s in bench.sets]
        words = [(b.T if b.stride(-1) != 1 else b).view(torch.int32).view(-1) for b in weights]
        launches = bench.launches_for(4e-4, bench.MOST_COPIES)
        for block, blocks, warps, stages in product((1024, 2048, 4096), (1, 2, 4, 8), (4, 8), (1, 4)):
            if blocks == 1 and stages > 1:
                continue
            grid = (triton.cdiv(words[0].numel(), block * blocks),)

            def call(i: int, grid=grid, block=block, blocks=blocks, warps=warps, stages=stages) -> None:
                read[grid](words[i % len(words)], out, words[0].numel(), block, blocks, stages, num_warps=warps)

            call(0)
            stream.synchronize()
            graph = bench.capture([lambda i=i, call=call: call(i) for i in range(launches)])
            times.append(median(bench.timer.time(graph, launches) for _ in range(ROUNDS)))
            graph.destroy()
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="results of python -m tritongemm.tune, of this GPU")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    here = machine.find(None, None)
    if not here.devices:
        parser.error("memory_floor needs a GPU")
    records = [r.record for r in sizes.from_file(args.results, sizes.Defaults()) if r.record]
    few: list[Record] = [r for r in records if r.problem.m <= FEW and _words(r.problem)]
    rows = []
    print(f"{'size':<28} {'tuned us':>9} {'floor us':>9} {'GB/s':>6}  floor/tuned")
    for record in few:
        seconds = floor(record.problem, here, Protocol())
        nbytes = record.problem.n * record.problem.k * record.problem.b.bytes
        best = min(record.seconds, record.library_seconds or record.seconds)
        rows.append({"size": record.problem.key, "tuned": best, "floor": seconds})
        print(
            f"{record.problem.key:<28} {best * 1e6:9.2f} {seconds * 1e6:9.2f} {nbytes / seconds / 1e9:6.0f}  {seconds / best:.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

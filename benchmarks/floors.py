"""How much of a tuned time is the hardware's: kernels that only read or only multiply, by the protocol of the tuner.

    python benchmarks/floors.py RESULTS.yaml [--json OUT]

The floor of a size is the longer of two times: of the fastest of several kernels that read A and B once and write C once,
and of what the matrix instructions of its tiles take, on blocks that never change, in the fastest of several kernels (the
difference between doing them twice and once). All are launched through the same captured graphs, over the same rotation
of copies, are timed by the same timer, and rest where its races rest. A GEMM has to do both, so floor over tuned time is
1.00 where nothing but faster hardware helps. Launches that move operands follow one another ("alone"), or where the
tuner's may overlap, they overlap and wait for nothing ("at once"), which a GEMM can't.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tritongemm import machine, sizes
from tritongemm.hip_ext import driver
from tritongemm.problem import Problem
from tritongemm.target import Target
from tritongemm.workbench import Head, Protocol, Request, Workbench

MEASURED = ("alone", "at_once", "multiply")
ROUNDS = 11
TILES = (  # rows, columns, depth, warps
    (64, 16, 128, 4), (64, 32, 128, 4), (64, 64, 128, 4), (64, 128, 128, 4), (64, 256, 64, 4), (128, 64, 128, 4),
    (128, 64, 128, 8), (128, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8),
)  # fmt: skip
TRIED = 6  # tiles and splits, those that take the fewest instructions on the busiest compute unit
WORDS = 1 << 16  # of random numbers that blocks are read from


@triton.jit
def move(
    a_ptr, b_ptr, c_ptr, a_words, b_words, c_words, b_programs, a_programs,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Read B and A once, and write C once, as words of 32 bits; the next launch may begin at once."""
    if NEXT is not None:
        tl.inline_asm_elementwise(NEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    p = tl.program_id(0)
    if p < b_programs + a_programs:
        is_b = p < b_programs
        source = tl.where(is_b, b_ptr.to(tl.int64), a_ptr.to(tl.int64)).to(tl.pointer_type(tl.int32))
        count = tl.where(is_b, b_words, a_words)
        first = tl.where(is_b, p, p - b_programs).to(tl.int64) * BLOCK * BLOCKS
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for i in tl.range(BLOCKS, num_stages=STAGES):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            total ^= tl.load(tl.multiple_of(source, 16) + at, mask=at < count, other=0)
        # Never true of random data, which the compiler can't know: the loads stay, and nothing is written.
        if tl.sum(total) == 0x7FFFFFF1:
            tl.store(c_ptr, 1)
    else:
        first = (p - b_programs - a_programs).to(tl.int64) * BLOCK * BLOCKS
        for i in range(BLOCKS):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            tl.store(c_ptr + at, at.to(tl.int32), mask=at < c_words)


@triton.jit
def multiply(x_ptr, out_ptr, steps, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr):
    """The matrix instructions of one tile, on one block of each operand."""
    rows, cols, depth = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, DEPTH)
    a = tl.load(x_ptr + rows[:, None] * DEPTH + depth[None, :])
    b = tl.load(x_ptr + depth[:, None] + cols[None, :] * DEPTH)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for _ in range(steps):
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + rows[:, None] * COLS + cols[None, :], acc, mask=acc == 1.2345e30)


def moves(bench: Workbench, following: str | None) -> Iterator[Callable[[int], None]]:
    """Launches that move a size's operands, by the number of the copy; `following` lets the next one begin."""
    more = {"launch_pdl": True} if following else {}
    sets = [{name: _words(t) for name, t in s.items() if name in "abc"} for s in bench.sets]
    a, b, c = (sets[0][name].numel() for name in "abc")
    for block, blocks, warps, stages in product((1024, 2048, 4096), (1, 2, 4, 8), (4, 8), (1, 4)):
        if blocks == 1 and stages > 1:
            continue
        b_programs, a_programs, c_programs = (triton.cdiv(n, block * blocks) for n in (b, a, c))
        grid = (b_programs + a_programs + c_programs,)

        def launch(
            i: int, grid=grid, counts=(b_programs, a_programs), how=(block, blocks, stages), warps=warps
        ) -> None:
            s = sets[i % len(sets)]
            move[grid](s["a"], s["b"], s["c"], a, b, c, *counts, *how, following, num_warps=warps, **more)

        yield launch


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.stride(-1) == 1 else tensor.T).view(-1).view(torch.int32)


def products(problem: Problem, target: Target) -> Iterator[Callable[[int, int], None]]:
    """Launches of programs that stay and multiply as much as a size needs, padded to tiles, so many times over."""
    dtype, units = getattr(torch, problem.a.torch), target.compute_units
    x = torch.randn(WORDS, device="cuda").to(dtype)
    out = torch.empty(256 * 256, dtype=torch.float32, device="cuda")
    ways = set()
    for (rows, cols, depth, warps), split, swapped in product(TILES, (1, 2, 3, 4, 6, 8), (False, True)):
        m, n = (problem.n, problem.m) if swapped else (problem.m, problem.n)
        programs = triton.cdiv(m, rows) * triton.cdiv(n, cols) * split
        steps = triton.cdiv(programs, units) * triton.cdiv(problem.k, depth * split)
        ways.add((steps * rows * cols * depth, min(programs, units), steps, rows, cols, depth, warps))
    for _, programs, steps, *tile, warps in sorted(ways)[:TRIED]:

        def launch(times: int, i: int, grid=(programs,), steps=steps, tile=tuple(tile), warps=warps) -> None:
            multiply[grid](x, out, times * steps, *tile, num_warps=warps)

        yield launch


def seconds(bench: Workbench, launch: Callable[[int], None], head: Head) -> float:
    """Of one launch."""
    count = bench.launches_for(4e-4, bench.MOST_COPIES)
    launch(0)
    torch.cuda.current_stream().synchronize()
    graph = bench.capture([partial(launch, i) for i in range(count)])
    samples = []
    for _ in range(ROUNDS):
        head()
        samples.append(bench.timer.time(graph, count))
        bench.rest(samples[-1] * count)
    graph.destroy()
    return median(samples[1:])


def measure(problem: Problem, here: machine.Machine) -> dict[str, float]:
    """Seconds of the fastest that moves, ``alone`` and ``at_once``, and of the fastest that multiplies."""
    device = driver.open(here.vendor).device(here.devices[0])
    stream, following = torch.cuda.Stream(), here.target.overlap.get("next")
    request = Request("screen", problem, here.target, Protocol(), here.vendor, here.devices[0], ())
    with torch.cuda.stream(stream):
        bench = Workbench(request, device, stream.cuda_stream)
        torch.cuda.synchronize()
        head = Head(bench.sets[0]["a"].device)
        alone, at_once = (
            min(seconds(bench, launch, head) for launch in moves(bench, text)) for text in (None, following)
        )
        # What comes before the loop and after it is in both, and in no GEMM as it is here.
        twice = ([seconds(bench, partial(p, n), head) for n in (1, 2)] for p in products(problem, here.target))
        return {"alone": alone, "at_once": at_once, "multiply": min(two - one for one, two in twice)}


def share(row: dict[str, Any], moved: str) -> float:
    """Floor over tuned time, with operands moved ``alone`` or ``at_once``."""
    return float(max(row[moved], row["multiply"]) / row["tuned"])


def mean(shares: Iterable[float]) -> float:
    """Geometric."""
    return exp(fmean(map(log, shares)))


def fits(problem: Problem) -> bool:
    """Whether the kernels here stand for those of a size: whole words of 32 bits, and 16-bit matrix instructions."""
    shapes = (
        (problem.m * problem.k, problem.a),
        (problem.k * problem.n, problem.b),
        (problem.m * problem.n, problem.c),
    )
    return problem.dtype_a == problem.dtype_b in ("bf16", "fp16") and all(n * d.bytes % 4 == 0 for n, d in shapes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="results of python -m tritongemm.tune, of this GPU")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    here = machine.find(None, None)
    if not here.devices:
        parser.error("floors needs a GPU")
    rows: list[dict[str, Any]] = []
    print(
        f"{'size':<28}" + "".join(f"{name:>10}" for name in ("tuned us", *MEASURED)) + "  floor/tuned: alone, at once"
    )
    for record in (r.record for r in sizes.from_file(args.results, sizes.Defaults()) if r.record):
        problem = record.problem
        if not fits(problem):
            print(f"{problem.key:<28} is not of whole words of bf16 or fp16")
            continue
        row: dict[str, Any] = {"size": problem.key, "m": problem.m, **measure(problem, here)}
        row["tuned"] = min(record.seconds, record.library_seconds or record.seconds)
        row["roofline"] = here.target.roofline_seconds(problem.flops, problem.bytes, problem.a)
        rows.append(row)
        torch.cuda.empty_cache()
        times = "".join(f"{row[name] * 1e6:10.2f}" for name in ("tuned", *MEASURED))
        print(f"{problem.key:<28}{times}  {share(row, 'alone'):.2f}  {share(row, 'at_once'):.2f}", flush=True)
    groups = {f"M = {m}": [r for r in rows if r["m"] == m] for m in sorted({r["m"] for r in rows})}
    for name, group in (*groups.items(), ("all", rows)):
        if group:
            alone, at_once = (mean(share(r, how) for r in group) for how in ("alone", "at_once"))
            roofline = mean(r["roofline"] / r["tuned"] for r in group)
            print(f"{name}: floor/tuned {alone:.2f} alone, {at_once:.2f} at once; share of the roofline {roofline:.3f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

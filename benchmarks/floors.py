"""How much of a tuned time is the hardware's: kernels that only read or only multiply, by the protocol of the tuner.

    python benchmarks/floors.py RESULTS.yaml [--json OUT]

The floor of a size is the longer of two times. One is that of the fastest of several kernels that read A and B once and
write C once. The other is what the best tiles take, at any split of K, on the compute unit that has the most of them: as
long as their matrix instructions, or as long as their blocks come in. Its rates are measured first, from the difference
between so many steps along K and twice as many: of multiplying blocks that never change, and blocks that the copy engine
keeps fetching from L2. To it comes what a launch takes that does one step.

All is launched through captured graphs, over the tuner's rotation of copies, is timed by its timer, and rests where its
races rest. A GEMM has to do all of it, so floor over tuned time is 1.00 where nothing but faster hardware helps. In the
first column launches follow one another; in the second ("at once") they overlap, where the tuner's may, and wait for
nothing, which a GEMM can't.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tritongemm import machine, sizes
from tritongemm.dtypes import DType
from tritongemm.errors import TritonGemmError
from tritongemm.hip_ext import driver
from tritongemm.problem import Problem
from tritongemm.target import Target
from tritongemm.workbench import Head, Protocol, Request, Workbench

MEASURED = ("alone", "at_once", "tiles")
ROUNDS = 11
TILES = (  # rows, columns, depth, warps, stages: those that multiply fastest, and those that move the most to multiply
    (128, 256, 64, 8, 4), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 6), (64, 256, 64, 4, 4),
    (64, 128, 128, 4, 4), (128, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 64, 64, 4, 8),
)  # fmt: skip
ROWS = 64  # of a matrix instruction
MOST_ROWS, MOST_COLUMNS, MOST_SUMS = 256, 256, 128 * 256  # of a tile, whose sums are held in registers
SPLITS = (1, 2, 3, 4, 6, 8)
STEPS = 64  # of a launch that measures a rate
BLOCKS = 4  # of K, that are fetched in turn


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


@triton.jit
def feed(
    a_desc, b_desc, out_ptr, steps,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The same, on blocks that the copy engine fetches, the same few for all programs."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for i in tl.range(steps, num_stages=STAGES):
        at = i % BLOCKS * DEPTH
        acc = tl.dot(a_desc.load([0, at]), b_desc.load([0, at]).T, acc)
    tl.store(out_ptr + rows[:, None] * COLS + cols[None, :], acc, mask=acc == 1.2345e30)


def moves(bench: Workbench, following: str | None) -> Iterator[Callable[[int], None]]:
    """Launches that move a size's operands, by the number of the copy; `following` lets the next one begin."""
    more = {"launch_pdl": True} if following else {}
    sets = [{name: _words(t) for name, t in s.items() if name in "abc"} for s in bench.sets]
    a, b, c = (sets[0][name].numel() for name in "abc")
    for block, blocks, stages in product((1024, 2048, 4096), (1, 2, 4, 8), (1, 4)):
        if blocks == 1 and stages > 1:
            continue
        b_programs, a_programs, c_programs = (triton.cdiv(n, block * blocks) for n in (b, a, c))
        grid = (b_programs + a_programs + c_programs,)

        def launch(i: int, grid=grid, counts=(b_programs, a_programs), how=(block, blocks, stages)) -> None:
            s = sets[i % len(sets)]
            move[grid](s["a"], s["b"], s["c"], a, b, c, *counts, *how, following, **more)

        yield launch


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.stride(-1) == 1 else tensor.T).view(-1).view(torch.int32)


@dataclass(frozen=True)
class Rates:
    """What a compute unit does in a second, and what a launch takes beside its steps along K.

    Attributes:
        operations: multiplications and additions.
        bytes: that come into its shared memory.
        launch: seconds.
    """

    operations: float
    bytes: float
    launch: float

    def tiles(self, problem: Problem, units: int) -> float:
        """Seconds of the unit that has most to do, by the best tiles whose columns are multiples of 8."""
        best = math.inf
        for m, n in ((problem.m, problem.n), (problem.n, problem.m)):
            for rows, cols, split in product(range(ROWS, MOST_ROWS + 1, ROWS), range(8, MOST_COLUMNS + 1, 8), SPLITS):
                if rows * cols <= MOST_SUMS:
                    rounds = -(-(-(-m // rows) * -(-n // cols) * split) // units)
                    step = max(2 * rows * cols / self.operations, (rows + cols) * problem.a.bytes / self.bytes)
                    # Of a tile that programs share each adds up its part, and gets the others' sums of that.
                    sums = 4 * rows * cols * (split - 1) / split / self.bytes
                    best = min(best, rounds * (problem.k / split * step + sums))
        return best


def rates(bench: Workbench, problem: Problem, target: Target, head: Head) -> Rates:
    """The best of `TILES` at each, with a program on every compute unit."""
    dtype, units = getattr(torch, problem.a.torch), target.compute_units
    x = torch.randn(MOST_ROWS, BLOCKS * 128, device="cuda").to(dtype)
    out = torch.empty(MOST_ROWS * MOST_COLUMNS, dtype=torch.float32, device="cuda")
    found: list[Rates] = []
    for rows, cols, depth, warps, stages in TILES:
        wide = x[:, : BLOCKS * depth].contiguous()
        blocks = [TensorDescriptor.from_tensor(wide, [n, depth]) for n in (rows, cols)]

        def still(steps: int, i: int, tile: tuple[int, ...] = (rows, cols, depth), warps: int = warps) -> None:
            multiply[(units,)](x, out, steps, *tile, num_warps=warps)

        def fed(
            steps: int, i: int, given=blocks, tile: tuple[int, ...] = (rows, cols, depth, stages), warps: int = warps
        ) -> None:
            feed[(units,)](*given, out, steps, *tile, BLOCKS, num_warps=warps)

        def step(how: Callable[[int, int], None]) -> float:
            once, twice = (seconds(bench, partial(how, n * STEPS), head) for n in (1, 2))
            return (twice - once) / STEPS

        arriving = step(fed)
        one = seconds(bench, partial(fed, 1), head)
        operations, moved = 2 * rows * cols * depth / step(still), (rows + cols) * depth * problem.a.bytes / arriving
        found.append(Rates(operations, moved, one - arriving))
    return Rates(max(r.operations for r in found), max(r.bytes for r in found), min(r.launch for r in found))


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


def measure(problem: Problem, here: machine.Machine, known: dict[DType, Rates]) -> dict[str, float]:
    """Seconds of the floors ``alone`` and ``at_once``, and of the best ``tiles`` beside what moves; `known`: rates by type."""
    device = driver.open(here.vendor).device(here.devices[0])
    stream, following = torch.cuda.Stream(), here.target.overlap.get("next")
    request = Request("screen", problem, here.target, Protocol(), here.vendor, here.devices[0], ())
    with torch.cuda.stream(stream):
        bench = Workbench(request, device, stream.cuda_stream)
        torch.cuda.synchronize()
        head = Head(bench.sets[0]["a"].device)
        if problem.a not in known:
            rate = known[problem.a] = rates(bench, problem, here.target, head)
            print(
                f"a compute unit: {rate.operations / 1e12:.2f} TFLOPS, {rate.bytes / 1e9:.0f} GB/s come in;"
                f" a launch: {rate.launch * 1e6:.2f} us"
            )
        alone, at_once = (
            min(seconds(bench, launch, head) for launch in moves(bench, text)) for text in (None, following)
        )
        rate = known[problem.a]
        tiles = rate.tiles(problem, here.target.compute_units)
        return {"alone": max(alone, rate.launch + tiles), "at_once": max(at_once, tiles), "tiles": tiles}


def share(row: dict[str, Any], floor: str) -> float:
    """Floor over tuned time, ``alone`` or ``at_once``."""
    return float(row[floor] / row["tuned"])


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
    try:
        records = [r.record for r in sizes.from_file(args.results, sizes.Defaults()) if r.record]
        here = machine.find(None, None)
    except TritonGemmError as error:
        parser.error(str(error))
    if not records:
        parser.error(f"{args.results} holds no results, only sizes: tune them first")
    if not here.devices:
        parser.error("floors needs a GPU")
    rows: list[dict[str, Any]] = []
    known: dict[DType, Rates] = {}
    print(
        f"{'size':<28}" + "".join(f"{name:>10}" for name in ("tuned us", *MEASURED)) + "  floor/tuned: alone, at once"
    )
    for record in records:
        problem = record.problem
        if not fits(problem):
            print(f"{problem.key:<28} is not of whole words of bf16 or fp16")
            continue
        row: dict[str, Any] = {"size": problem.key, "m": problem.m, **measure(problem, here, known)}
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

"""How much of a tuned time is the hardware's: kernels that only read or only multiply, by the protocol of the tuner.

    python benchmarks/floors.py RESULTS.yaml [--json OUT]

The floor of a size is the longer of two times. One is that of the fastest of several kernels that read A and B once and
write C once. The other is that of the best tiles, at any split of K: the longer of what their matrix instructions take
on the compute unit that has the most of them, and of what it takes the copy engine to bring all their blocks in from
where a race's operands are, measured by kernels that do only that. The rate of matrix instructions is measured first,
from the difference between some steps along K and twice as many, on random blocks that the copy engine keeps
fetching from L2; to it comes what a launch takes that does one step. How many clocks a step of matrix instructions
takes, and what the clock is meanwhile, are printed for random operands and for zeros, which draw less power.

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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
import triton
from _common import make_operands
from floor_kernels import bring, feed, move, multiply
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritongemm.core.dtypes import DType
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.format_row import Defaults
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.hip_ext import machine
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets
from tritongemm.workloads import sizes

MEASURED = ("alone", "at_once", "tiles")
ROUNDS = 11
TILES = (  # rows, columns, bytes along K, warps, stages: those that multiply fastest, and those that move the most
    (128, 256, 128, 8, 4), (256, 128, 128, 8, 4), (128, 128, 128, 8, 4), (128, 128, 128, 4, 6), (64, 256, 128, 4, 4),
    (64, 128, 256, 4, 4), (128, 64, 256, 4, 4), (64, 64, 256, 4, 6), (64, 64, 128, 4, 8),
)  # fmt: skip
ROWS = 64  # of a matrix instruction
MOST_ROWS, MOST_COLUMNS, MOST_SUMS = 256, 256, 128 * 256  # of a tile, whose sums are held in registers
SPLITS = (1, 2, 3, 4, 6, 8)
PARTS = 3  # powers of two, at most, that the columns of a tile are brought in as
RING_BYTES = 220_000  # of blocks under way on a compute unit
MOST_SLOTS = 12
GROUPS = (1, 2, 4, 8)  # rows of tiles walked together
MOST_BROUGHT = 24  # tiles of a size whose blocks are brought in; what the others take is bounded by rates alone
STEPS = 64  # of a launch that measures a rate
PACED = 300  # of one that measures the clock, 0.2 ms long
REST = 0.02  # seconds before it
ROW_BYTES = 128  # of blocks that are brought in
BLOCKS = 4  # of K, that are fetched in turn


def moves(bench: OperandSets, following: str | None) -> Iterator[Callable[[int], None]]:
    """Launches that move a size's operands, by the number of the copy; `following` lets the next one begin."""
    more = {"launch_pdl": True} if following else {}
    sets = [{name: _words(t) for name, t in s.items() if name in "abc"} for s in bench.sets]
    a, b, c = (sets[0][name].numel() for name in "abc")
    for block, blocks, stages in product((1024, 2048, 4096), (1, 2, 4, 8), (1, 4)):
        if blocks == 1 and stages > 1:
            continue
        b_programs, a_programs, c_programs = (triton.cdiv(n, block * blocks) for n in (b, a, c))
        grid = (b_programs + a_programs + c_programs,)

        def launch(
            i: int,
            grid: tuple[int] = grid,
            counts: tuple[int, int] = (b_programs, a_programs),
            constants: tuple[int, int, int] = (block, blocks, stages),
        ) -> None:
            s = sets[i % len(sets)]
            move[grid](s["a"], s["b"], s["c"], a, b, c, *counts, *constants, following, **more)

        yield launch


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor if tensor.stride(-1) == 1 else tensor.T).view(-1).view(torch.int32)


@dataclass(frozen=True)
class Tile:
    """A tile of C or, if swapped, of its transpose.

    Attributes:
        rows, columns: multiples of a matrix instruction's, and of 8.
        split: programs that share it along K.
        swapped: rows of it are columns of C.
    """

    rows: int
    columns: int
    split: int
    swapped: bool

    def programs(self, problem: Problem) -> int:
        """The number of programs that compute a problem in such tiles."""
        m, n = (problem.n, problem.m) if self.swapped else (problem.m, problem.n)
        return cdiv(m, self.rows) * cdiv(n, self.columns) * self.split

    def parts(self) -> list[int]:
        """Its columns as powers of two, wide ones first."""
        bits = range(self.columns.bit_length() - 1, -1, -1)
        return [1 << i for i in bits if self.columns >> i & 1]


def all_tiles() -> Iterator[Tile]:
    """The tiles whose sums a compute unit holds in registers."""
    for swapped, rows, columns, split in product(
        (False, True), range(ROWS, MOST_ROWS + 1, ROWS), range(8, MOST_COLUMNS + 1, 8), SPLITS
    ):
        if rows * columns <= MOST_SUMS:
            yield Tile(rows, columns, split, swapped)


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

    def tile(self, problem: Problem, tile: Tile, units: int) -> float:
        """The seconds of the compute unit that has the most of a problem's tiles to do."""
        rounds = cdiv(tile.programs(problem), units)
        area, sides = tile.rows * tile.columns, (tile.rows + tile.columns) * problem.a.type.bytes
        step = max(2 * area / self.operations, sides / self.bytes)
        # Of a tile that programs share each adds up its part, and gets the others' sums of that.
        sums = 4 * area * (tile.split - 1) / tile.split / self.bytes
        return rounds * (problem.k / tile.split * step + sums)

    def tiles(self, problem: Problem, units: int) -> float:
        """The seconds of the best tiles; see `tile`."""
        return min(self.tile(problem, tile, units) for tile in all_tiles())


def rates(bench: OperandSets, problem: Problem, target: Target, head: LeadInKernel) -> Rates:
    """The best of `TILES` at each, with a program on every compute unit, fed by the copy engine from L2."""
    dtype, units = getattr(torch, problem.a.type.torch), target.compute_units
    x = torch.randn(MOST_ROWS, BLOCKS * 256 // problem.a.type.bytes, device="cuda").to(dtype)
    out = torch.empty(MOST_ROWS * MOST_COLUMNS, dtype=torch.float32, device="cuda")
    found: list[Rates] = []
    for rows, cols, row_bytes, warps, stages in TILES:
        depth = row_bytes // problem.a.type.bytes
        wide = x[:, : BLOCKS * depth].contiguous()
        blocks = [TensorDescriptor.from_tensor(wide, [n, depth]) for n in (rows, cols)]

        def fed(
            steps: int,
            i: int,
            given: list[TensorDescriptor] = blocks,
            tile: tuple[int, ...] = (rows, cols, depth, stages),
            warps: int = warps,
        ) -> None:
            feed[(units,)](*given, out, steps, *tile, BLOCKS, num_warps=warps)

        once, twice = (seconds(bench, partial(fed, n * STEPS), head) for n in (1, 2))
        step, one = (twice - once) / STEPS, seconds(bench, partial(fed, 1), head)
        found.append(
            Rates(2 * rows * cols * depth / step, (rows + cols) * depth * problem.a.type.bytes / step, one - step)
        )
    return Rates(max(r.operations for r in found), max(r.bytes for r in found), min(r.launch for r in found))


def clocks(problem: Problem, target: Target, head: LeadInKernel) -> Iterator[str]:
    """What the clock is while matrix instructions run without pause, and how many clocks they take."""
    (rows, cols, row_bytes, warps, _), units = TILES[0], target.compute_units
    depth = row_bytes // problem.a.type.bytes
    out = torch.empty(rows * cols, dtype=torch.float32, device="cuda")
    times = torch.empty(units, 2, dtype=torch.int64, device="cuda")
    noise = torch.randn(MOST_ROWS, depth, device="cuda").to(getattr(torch, problem.a.type.torch))
    for name, x in (("random operands", noise), ("zeros", torch.zeros_like(noise))):
        samples = []
        for _ in range(ROUNDS):
            time.sleep(REST)
            head()
            multiply[(units,)](x, out, times, PACED, rows, cols, depth, num_warps=warps)
            samples.append(times.double().median(0).values.tolist())
        taken, nanos = (median(s[i] for s in samples[1:]) for i in (0, 1))
        each = 2 * rows * cols * depth * PACED / taken
        yield f"matrix instructions, {name}: {each:.0f} operations a clock of {taken / nanos:.2f} GHz"


def brought(bench: OperandSets, problem: Problem, rate: Rates, units: int, head: LeadInKernel) -> float:
    """Seconds of a launch of the best tiles: they are multiplied at `rate`, and their blocks come in from memory.

    Of tiles whose rows are a power of two and whose columns are the sum of at most three.
    """
    tiles = (t for t in all_tiles() if t.rows.bit_count() == 1 and len(t.parts()) <= PARTS)
    least = sorted(((rate.launch + rate.tile(problem, t, units), t) for t in tiles), key=lambda pair: pair[0])
    best = math.inf
    for floor, tile in least[:MOST_BROUGHT]:
        if floor >= best:
            return best
        coming = min(seconds(bench, launch, head) for launch in bringing(bench, problem, tile, units))
        best = min(best, max(floor, coming))
    return min(best, least[MOST_BROUGHT][0])  # who knows what the next one's blocks take


def bringing(bench: OperandSets, problem: Problem, tile: Tile, units: int) -> Iterator[Callable[[int], None]]:
    """Launches that bring a tile's blocks in, for each number of rows of tiles walked together."""
    parts = [*tile.parts(), 0, 0][:PARTS]
    slots = min(MOST_SLOTS, RING_BYTES // ((tile.rows + tile.columns) * ROW_BYTES))
    boxes = (tile.rows, *(n or parts[0] for n in parts))
    sets = []
    for operands in bench.sets:
        a, b = operands["a"], operands["b"].T
        x, y = (b, a) if tile.swapped else (a, b)
        sets.append([_described(t, n) for t, n in zip((x, y, y, y), boxes, strict=True)])
    m, n = (problem.n, problem.m) if tile.swapped else (problem.m, problem.n)
    grid = (min(units, tile.programs(problem)),)
    for group in GROUPS:
        if group > 1 and group // 2 >= cdiv(m, tile.rows):
            continue

        def launch(i: int, group: int = group) -> None:
            where = sets[i % len(sets)]
            bring[grid](
                *where, m, n, problem.k, tile.split, group, tile.rows, *parts, ROW_BYTES // problem.a.type.bytes, slots
            )

        yield launch


def _described(tensor: torch.Tensor, rows: int) -> GluonDescriptor:
    block = [rows, ROW_BYTES // tensor.element_size()]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int8 if tensor.element_size() == 1 else gl.bfloat16)
    return GluonDescriptor.from_tensor(tensor, block, layout)


def seconds(bench: OperandSets, launch: Callable[[int], None], head: LeadInKernel) -> float:
    """The seconds of one launch."""
    count = bench.launches_for(4e-4, bench.MAX_COPIES)
    launch(0)
    torch.cuda.current_stream().synchronize()
    graph = bench.capture([partial(launch, i) for i in range(count)])
    samples = []
    for _ in range(ROUNDS):
        head()
        samples.append(bench.race_clock.time(graph, count))
        bench.rest(samples[-1] * count)
    graph.destroy()
    return median(samples[1:])


def measure(problem: Problem, here: machine.Machine, known: dict[DType, Rates]) -> dict[str, float]:
    """The seconds of the floors ``alone`` and ``at_once``, and of the best ``tiles`` beside what moves.

    Args:
        problem: a size.
        here: the machine.
        known: rates by type of element, to which this adds.
    """
    stream = torch.cuda.Stream()
    following = "griddepcontrol.launch_dependents;" if here.target.has("launch_overlap") else None
    with torch.cuda.stream(stream):
        bench = make_operands(problem, here, stream.cuda_stream)
        torch.cuda.synchronize()
        head = LeadInKernel(bench.sets[0]["a"].device)
        units = here.target.compute_units
        if problem.a.type not in known:
            rate = known[problem.a.type] = rates(bench, problem, here.target, head)
            print(*clocks(problem, here.target, head), sep="\n")
            print(
                f"a compute unit: {rate.operations / 1e12:.2f} TFLOPS, {rate.bytes / 1e9:.0f} GB/s come in;"
                f" a launch: {rate.launch * 1e6:.2f} us"
            )
        alone, at_once = (
            min(seconds(bench, launch, head) for launch in moves(bench, text)) for text in (None, following)
        )
        rate = known[problem.a.type]
        tiles = rate.tiles(problem, units)
        along_k = not problem.b.row_major and problem.a.row_major
        one_by_one = brought(bench, problem, rate, units, head) if along_k else rate.launch + tiles
        return {"alone": max(alone, one_by_one), "at_once": max(at_once, tiles), "tiles": tiles}


def share(row: dict[str, Any], floor: str) -> float:
    """Floor over tuned time, ``alone`` or ``at_once``."""
    return float(row[floor] / row["tuned"])


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The mean floors and share of the roofline of some sizes, in one line."""
    alone, at_once = (geometric_mean(share(r, how) for r in rows) for how in ("alone", "at_once"))
    roofline = geometric_mean(r["roofline"] / r["tuned"] for r in rows)
    return f"floor/tuned {alone:.2f} alone, {at_once:.2f} at once; share of the roofline {roofline:.3f}"


def fits(problem: Problem) -> bool:
    """Whether the kernels here stand for those of a size: full words of 32 bits, and instructions of 16 or 8 bits."""
    shapes = (
        (problem.m * problem.k, problem.a.type),
        (problem.k * problem.n, problem.b.type),
        (problem.m * problem.n, problem.c.type),
    )
    return problem.a.dtype == problem.b.dtype in ("bf16", "fp16", "fp8e4m3fn") and all(
        n * d.bytes % 4 == 0 for n, d in shapes
    )


def main() -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="results of tritongemm tune, of this GPU")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    try:
        records = [r.record for r in sizes.from_file(args.results, Defaults()) if r.record]
        here = machine.find_machine(None, None)
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
            print(f"{problem.key:<28} is not of full words of bf16, fp16 or fp8")
            continue
        row: dict[str, Any] = {"size": problem.key, "m": problem.m, **measure(problem, here, known)}
        row["tuned"] = min(record.seconds, record.library_seconds or record.seconds)
        row["roofline"] = here.target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)
        rows.append(row)
        torch.cuda.empty_cache()
        times = "".join(f"{row[name] * 1e6:10.2f}" for name in ("tuned", *MEASURED))
        print(f"{problem.key:<28}{times}  {share(row, 'alone'):.2f}  {share(row, 'at_once'):.2f}", flush=True)
    groups = {f"M = {m}": [r for r in rows if r["m"] == m] for m in sorted({r["m"] for r in rows})}
    for name, group in (*groups.items(), ("all", rows)):
        if group:
            print(f"{name}: {summary(group)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

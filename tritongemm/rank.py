"""Stage: kept configs → predicted order, from an analytical model of a compute unit and the memories behind it.

The model prunes and seeds; it is no clock. Every figure is a fact of the `Target` or one of the constants below, none
is fitted per size. Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, gcd

from tritongemm import occupancy
from tritongemm.config import Config
from tritongemm.occupancy import SIMDS
from tritongemm.problem import Problem
from tritongemm.schedule import PARTIAL_BYTES, Phase, combine_seconds, schedule
from tritongemm.target import Target
from tritongemm.trial import Built

CU_BYTES_PER_CLOCK = 64  # what one compute unit can draw from its L2
SYNC_CLOCKS = 200  # barrier, waits and branch of one K iteration
LINE_BYTES = 128  # what an L2 hands out at once
ROW_SHARE = 0.25  # of a row's extra bytes that memory feels: neighbouring programs soon want the rest of its line
VECTOR_BYTES = 16  # widest load of a thread
LDS_BYTES = 128  # of all banks of an LDS, 4 each
TRANSPOSE = 2.0  # reading an operand from shared memory across its rows, relative to along them
# Latency of a hit relative to a miss of every cache: rounded guesses, used only for operands that stay in caches.
L2_LATENCY, LLC_LATENCY = 0.3, 0.8
# How well work hides other work, from 1 (not at all) up: a queue's waiting and its traffic; loads and arithmetic of a
# pipelined loop; LDS and matrix units, better with more waves on a SIMD to take turns.
QUEUE_OVERLAP, PIPELINE_OVERLAP = 3.0, 5.0
LEAST_OVERLAP, WAVE_OVERLAP, MOST_OVERLAP = 1.5, 0.5, 5.0
FALLBACK_RATE = 0.6  # of the peak, for matrix instructions fed from registers where warp groups are native


@dataclass(frozen=True)
class Prediction:
    """What the model expects of a config.

    Attributes:
        config: the candidate.
        seconds: predicted time of one launch.
        terms: seconds each resource would need by itself: matrix, lds, l2, llc, hbm, latency, scratch,
            epilogue, reduce, launch.
        bound: name of the largest term.
    """

    config: Config
    seconds: float
    terms: dict[str, float] = field(hash=False)
    bound: str


def rank(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    built: Mapping[Config, Built] | None = None,
    warm: bool = False,
) -> list[Prediction]:
    """Predictions for `configs`, fastest first; of equal times the larger tile first, then the taller.

    Args:
        configs: candidates, each once.
        problem, target: what they run on.
        built: compiled configs, whose registers, spills and LDS replace the estimates.
        warm: launches follow each other on the same operands, which stay in the caches that hold them; our own timers
            never do that, some foreign tuners always do.
    """
    known = built or {}
    predictions = [predict(c, problem, target, known.get(c), warm) for c in configs]
    return sorted(predictions, key=_order)


def _order(prediction: Prediction) -> tuple[float, int, int, Config]:
    config = prediction.config
    return prediction.seconds, -config.block_m * config.block_n, -config.block_m, config


def predict(
    config: Config, problem: Problem, target: Target, built: Built | None = None, warm: bool = False
) -> Prediction:
    """Expected time of one launch of `config`, to the picosecond, with what it is made of; arguments as of `rank`."""
    clock = target.clock_ghz * 1e9
    cu_rate = CU_BYTES_PER_CLOCK * clock
    tile = _Tile.of(config, problem, target)
    fits = occupancy.per_cu(config, problem, target, built)
    spilled = 4 * _excess_registers(config, problem, target)
    if built is not None and built.status == "ok":
        # Registers that the loop does not touch are spilled first, and that is free.
        spilled = max(0, built.spills - 4 * occupancy.BOOKKEEPING_REGISTERS)
    scratch = 2 * spilled * config.num_warps * target.wave_size / cu_rate
    terms = dict.fromkeys(("matrix", "lds", "l2", "llc", "hbm", "latency", "epilogue", "scratch"), 0.0)
    seconds = 0.0
    phases = schedule(config, problem, target, fits)
    latency, llc_felt, hbm_felt = _reach(config, problem, target, phases, tile, warm)
    for phase in phases:
        busy, here = min(phase.programs, target.compute_units), phase.resident
        fair = min(cu_rate, target.l2_gbps * 1e9 / busy)
        llc, hbm = _shared_seconds(config, problem, target, phase, tile)
        step = {
            "matrix": max(1.0, here * config.num_warps / SIMDS) * tile.matrix,
            "lds": here * tile.lds,
            "l2": here * max(tile.issue, tile.traffic / fair),
            "llc": llc * llc_felt,
            "hbm": hbm * hbm_felt,
            "latency": (latency + tile.traffic / cu_rate) / max(1, config.num_stages - 1) + SYNC_CLOCKS / clock,
            "scratch": here * scratch,
        }
        if config.num_stages <= 1:
            step["latency"] += step["matrix"] + step["lds"]
        waves = here * config.num_warps / SIMDS
        traffic = max(step["l2"], step["llc"], step["hbm"])
        load = _overlap(QUEUE_OVERLAP, traffic, step["latency"])
        compute = _overlap(min(MOST_OVERLAP, LEAST_OVERLAP + WAVE_OVERLAP * waves), step["matrix"], step["lds"])
        iteration = _overlap(PIPELINE_OVERLAP, load, compute) + step["scratch"]
        # Nothing is computed while the first tile is loaded, nothing is loaded while the last one is computed.
        ends = latency + traffic + max(step["matrix"], step["lds"]) + step["scratch"]
        width = PARTIAL_BYTES if phase.shared > 1 else problem.c.bytes
        stored = here * config.block_m * config.block_n * width
        epilogue = latency + stored / min(cu_rate, 2 * target.hbm_gbps * 1e9 / busy)
        seconds += phase.count * ((phase.loop - 1) * iteration + ends + epilogue)
        for name, value in step.items():
            terms[name] += phase.count * phase.loop * value
        terms["epilogue"] += phase.count * epilogue
    terms["reduce"] = combine_seconds(config, problem, target, cu_rate, fits)
    terms["launch"] = target.launch_us * 1e-6
    seconds = round(seconds + terms["reduce"] + terms["launch"], 12)
    return Prediction(config, seconds, terms, max(terms, key=terms.__getitem__))


def _reach(
    config: Config, problem: Problem, target: Target, phases: tuple[Phase, ...], tile: _Tile, warm: bool
) -> tuple[float, float, float]:
    """Seconds until a load arrives, and what share of their traffic last-level cache and memory feel."""
    latency = target.memory_ns * 1e-9
    if not warm:
        return latency, 1.0, 1.0
    dies = min(target.xcds, phases[0].programs)
    filled = sum(p.count * p.loop * _shared_seconds(config, problem, target, p, tile)[0] for p in phases)
    if filled * target.llc_gbps * 1e9 / dies <= target.l2_bytes:
        return latency * L2_LATENCY, 0.0, 0.0
    return (latency * LLC_LATENCY, 1.0, 0.0) if problem.bytes <= target.llc_bytes else (latency, 1.0, 1.0)


def _overlap(power: float, *seconds: float) -> float:
    """Between the sum (power 1) and the maximum (power infinite) of work that partly runs at once."""
    longest = max(seconds)
    return float(longest * sum((s / longest) ** power for s in seconds) ** (1 / power))


@dataclass(frozen=True)
class _Tile:
    """One K iteration of one program.

    Attributes:
        a, b: bytes of its blocks of A and B, as an L2 feels them.
        far_a, far_b: the same as the caches and memory behind it feel them.
        matrix: seconds of a warp's matrix instructions on one SIMD.
        lds: seconds of LDS traffic on one compute unit.
        issue: seconds to issue its loads, longer when rows are not aligned to the widest load.
    """

    a: float
    b: float
    far_a: float
    far_b: float
    matrix: float
    lds: float
    issue: float

    @property
    def traffic(self) -> float:
        return self.a + self.b

    @classmethod
    def of(cls, config: Config, problem: Problem, target: Target) -> _Tile:
        clock, split = target.clock_ghz * 1e9, occupancy.warps(config, target)
        a = config.block_m * config.block_k * problem.a.bytes
        b = config.block_n * config.block_k * problem.b.bytes
        own = split.rows * split.shape[0] * split.columns * split.shape[1] * config.block_k
        matrix = 2 * own / (_matrix_flops(problem, target) / target.compute_units / SIMDS)
        if occupancy.async_matrix(config, target):
            lds: float = a + b * max(1, config.block_m // 64)
        else:
            matrix /= FALLBACK_RATE if target.has("wgmma") else 1.0
            across_a = 1.0 if problem.row_major_a else _across(split.shape[0], problem.a.bytes, target)
            across_b = _across(split.shape[1], problem.b.bytes, target) if problem.row_major_b else 1.0
            lds = a * split.along_n * across_a + b * split.along_m * across_b + a + b
        run_a = (config.block_k if problem.row_major_a else config.block_m) * problem.a.bytes
        run_b = (config.block_n if problem.row_major_b else config.block_k) * problem.b.bytes
        row_a, row_b = _rows(problem)
        vector_a, vector_b = gcd(row_a, VECTOR_BYTES), gcd(row_b, VECTOR_BYTES)
        return cls(
            a=a * _lines(row_a, run_a) * LINE_BYTES / run_a,
            b=b * _lines(row_b, run_b) * LINE_BYTES / run_b,
            far_a=a * (1 + ROW_SHARE * _request(row_a, target) / run_a),
            far_b=b * (1 + ROW_SHARE * _request(row_b, target) / run_b),
            matrix=matrix,
            lds=lds / (target.lds_bytes_per_clock * clock),
            issue=(a / vector_a + b / vector_b) * VECTOR_BYTES / (CU_BYTES_PER_CLOCK * clock),
        )


def _matrix_flops(problem: Problem, target: Target) -> float:
    """Peak rate for the operands; those without matrix instructions are converted and run at fp16's."""
    rates = target.peak_tflops
    slower = max(problem.a, problem.b, key=lambda d: d.bytes)
    return 1e12 * (target.tflops(slower) if target.supports(slower) else rates.get("fp16", min(rates.values())))


def _rows(problem: Problem) -> tuple[int, int]:
    """Bytes from one stored row of A and of B to the next."""
    row_a = (problem.k if problem.row_major_a else problem.m) * problem.a.bytes
    return row_a, (problem.n if problem.row_major_b else problem.k) * problem.b.bytes


def _across(side: int, width: int, target: Target) -> float:
    """Cost of reading elements of `width` bytes across the rows of an operand in LDS, relative to along them.

    Where loads pass through registers, rows stay in LDS as they are in memory and every lane fetches single elements.
    The `side` lanes of a matrix instruction's row find theirs side by side; those of other rows fall into the same
    banks, so one row is read a clock. (Newer compilers transpose in registers when a thread holds enough rows.)
    """
    return max(1.0, LDS_BYTES / (side * width)) if target.has("register_staging") else TRANSPOSE


def _lines(row: int, run: int) -> float:
    """Lines that `run` bytes touch on average: one starts at any multiple of what rows, runs and lines share."""
    return (run + LINE_BYTES - gcd(row, run, LINE_BYTES)) / LINE_BYTES


def _request(row: int, target: Target) -> int:
    return target.request_bytes * (1 if row % LINE_BYTES == 0 else 2)


def _excess_registers(config: Config, problem: Problem, target: Target) -> int:
    """Registers the K loop wants beyond those a thread may have; masks along K and narrow loads want more."""
    limit, held = occupancy.register_limit(config, target), occupancy.accumulators(config, target)
    if occupancy.async_matrix(config, target) and held >= limit and not target.has("tensor_memory"):
        return held  # an asynchronous instruction needs all of its accumulators at once, so all are spilled each time
    waiting = occupancy.staging(config, problem, target)
    need = occupancy.registers(config, problem, target) - occupancy.BOOKKEEPING_REGISTERS
    need += waiting // 2 if problem.k % config.block_k else 0
    need += waiting if any(row % VECTOR_BYTES for row in _rows(problem)) else 0
    return max(0, need - limit)


def _shared_seconds(config: Config, problem: Problem, target: Target, phase: Phase, tile: _Tile) -> tuple[float, float]:
    """Seconds of last-level cache and of memory per K iteration: what the programs under way do not share.

    Programs on one die, neighbours in launch order, share its L2; those of all dies share the last-level cache.
    """
    rows, columns = ceil(problem.m / config.block_m), ceil(problem.n / config.block_n)

    def unique(tiles: float) -> float:
        tall = min(config.group_m, rows, tiles)
        wide = tiles / tall
        if wide > columns:
            tall, wide = min(rows * problem.batch, tall * wide / columns), columns
        return tall * tile.far_a + wide * tile.far_b

    tiles = phase.programs / phase.shared
    dies = min(target.xcds, phase.programs)
    llc = dies * phase.shared * unique(max(1.0, tiles / dies))
    hbm = phase.shared * unique(max(1.0, tiles))
    return llc / (target.llc_gbps * 1e9), hbm / (target.hbm_gbps * 1e9)

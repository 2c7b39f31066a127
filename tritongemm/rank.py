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
LINE_BYTES = 128  # rows that do not start on a line touch one more of them
VECTOR_BYTES = 16  # widest load of a thread
TRANSPOSE = 2.0  # reading an operand from LDS across its rows, relative to along them
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
    configs: Iterable[Config], problem: Problem, target: Target, built: Mapping[Config, Built] | None = None
) -> list[Prediction]:
    """Predictions for `configs`, fastest first; equal times in the order of the configs themselves.

    Args:
        configs: candidates, each once.
        problem, target: what they run on.
        built: compiled configs, whose registers, spills and LDS replace the estimates.
    """
    known = built or {}
    predictions = [predict(c, problem, target, known.get(c)) for c in configs]
    return sorted(predictions, key=lambda p: (p.seconds, p.config))


def predict(config: Config, problem: Problem, target: Target, built: Built | None = None) -> Prediction:
    """Expected time of one launch of `config`, with what it is made of."""
    clock, latency = target.clock_ghz * 1e9, target.memory_ns * 1e-9
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
    for phase in schedule(config, problem, target, fits):
        busy, here = min(phase.programs, target.compute_units), phase.resident
        fair = min(cu_rate, target.l2_gbps * 1e9 / busy)
        llc, hbm = _shared_seconds(config, problem, target, phase, tile)
        step = {
            "matrix": max(1.0, here * config.num_warps / SIMDS) * tile.matrix,
            "lds": here * tile.lds,
            "l2": here * max(tile.issue, tile.traffic / fair),
            "llc": llc,
            "hbm": hbm,
            "latency": (latency + tile.traffic / cu_rate) / max(1, config.num_stages - 1) + SYNC_CLOCKS / clock,
            "scratch": here * scratch,
        }
        if config.num_stages <= 1:
            step["latency"] += step["matrix"] + step["lds"]
        # More waves on a SIMD hide more of each other's waiting: from nearly a sum to nearly a maximum.
        power = min(5.0, 2.0 + 0.5 * here * config.num_warps / SIMDS)
        memory = max(step["l2"], step["llc"], step["hbm"])
        iteration = _overlap(power, step["matrix"], step["lds"], memory, step["latency"]) + step["scratch"]
        width = PARTIAL_BYTES if phase.shared > 1 else problem.c.bytes
        stored = here * config.block_m * config.block_n * width
        epilogue = latency + stored / min(cu_rate, 2 * target.hbm_gbps * 1e9 / busy)
        seconds += phase.count * (phase.loop * iteration + epilogue + latency)
        for name, value in step.items():
            terms[name] += phase.count * phase.loop * value
        terms["epilogue"] += phase.count * epilogue
    terms["reduce"] = combine_seconds(config, problem, target, cu_rate, fits)
    terms["launch"] = target.launch_us * 1e-6
    return Prediction(config, seconds + terms["reduce"] + terms["launch"], terms, max(terms, key=terms.__getitem__))


def _overlap(power: float, *seconds: float) -> float:
    """Between the sum (power 1) and the maximum (power infinite) of work that partly runs at once."""
    longest = max(seconds)
    return float(longest * sum((s / longest) ** power for s in seconds) ** (1 / power))


@dataclass(frozen=True)
class _Tile:
    """One K iteration of one program.

    Attributes:
        a, b: bytes of its blocks of A and B, as caches and memory feel them.
        matrix: seconds of a warp's matrix instructions on one SIMD.
        lds: seconds of LDS traffic on one compute unit.
        issue: seconds to issue its loads, longer when rows are not aligned to the widest load.
    """

    a: float
    b: float
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
            lds = a * split.along_n * (1.0 if problem.row_major_a else TRANSPOSE)
            lds += b * split.along_m * (TRANSPOSE if problem.row_major_b else 1.0) + a + b
        run_a = (config.block_k if problem.row_major_a else config.block_m) * problem.a.bytes
        run_b = (config.block_n if problem.row_major_b else config.block_k) * problem.b.bytes
        row_a, row_b = _rows(problem)
        vector_a, vector_b = gcd(row_a, VECTOR_BYTES), gcd(row_b, VECTOR_BYTES)
        return cls(
            a=a * (1 + _request(row_a, target) / run_a),
            b=b * (1 + _request(row_b, target) / run_b),
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


def _request(row: int, target: Target) -> int:
    return target.request_bytes * (1 if row % LINE_BYTES == 0 else 2)


def _excess_registers(config: Config, problem: Problem, target: Target) -> int:
    """Registers the K loop wants beyond those a thread may have; masks along K and narrow loads want more."""
    waiting = occupancy.staging(config, problem, target)
    need = occupancy.registers(config, problem, target) - occupancy.BOOKKEEPING_REGISTERS
    need += waiting // 2 if problem.k % config.block_k else 0
    need += waiting if any(row % VECTOR_BYTES for row in _rows(problem)) else 0
    return max(0, need - occupancy.register_limit(config, target))


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
        return tall * tile.a + wide * tile.b

    tiles = phase.programs / phase.shared
    dies = min(target.xcds, phase.programs)
    llc = dies * phase.shared * unique(max(1.0, tiles / dies))
    hbm = phase.shared * unique(max(1.0, tiles))
    return llc / (target.llc_gbps * 1e9), hbm / (target.hbm_gbps * 1e9)

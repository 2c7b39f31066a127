"""The cost of one K iteration of a program on a compute unit: traffic, matrix instructions, LDS, spilled registers.

Part of `tritongemm.search.cost_model.model`. Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.artifact import Artifact, LoopFacts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model import occupancy
from tritongemm.search.cost_model.occupancy import SIMDS

Number = TypeVar("Number", float, NDArray[np.float64])  # of one candidate, or a column of many
# bytes a clock that one compute unit can draw from its L2
CU_BYTES_PER_CLOCK = 64
# bytes that an L2 delivers at once
LINE_BYTES = 128
# share of the wasted bytes of a line at a row's end that memory carries: neighbours soon need the rest of it
ROW_SHARE = 0.25
# bytes of the widest load of a thread
VECTOR_BYTES = 16
# bytes a clock of all banks of an LDS, 4 each
LDS_BANK_BYTES = 128
# cost of reading an operand from shared memory across its rows, relative to along them
TRANSPOSE_COST = 2.0
# clocks from one product of a thread to its next: operands are converted, then multiplied and added
PRODUCT_CLOCKS = 4.0
# sums that one SIMD multiplies and adds in a clock
ADDED_A_CLOCK = 32
# instructions of a thread for each weight of four bits that it widens
WIDENING_INSTRUCTIONS = 2.0
# Matrix instructions fed from registers reach this share of the peak where warp groups are native.
FALLBACK_RATE = 0.6


@dataclass(frozen=True)
class IterationCost(Generic[Number]):
    """The cost of one K iteration of one program."""

    # a, b: bytes of its blocks of A and B, as L2 traffic
    a: Number
    b: Number
    # far_a, far_b: the same as traffic of the caches and memory behind L2
    far_a: Number
    far_b: Number
    matrix: Number  # seconds of a warp's matrix instructions on one SIMD
    lds: Number  # seconds of LDS traffic on one compute unit
    issue: Number  # seconds to issue its loads, longer when rows are not aligned to the widest load

    @property
    def traffic(self) -> Number:
        """Bytes of A and B that one iteration loads."""
        return self.a + self.b

    @classmethod
    def estimate(cls, config: Config, problem: Problem, target: Target) -> IterationCost[float]:
        """Estimate the cost of one K iteration of a config that has not been compiled."""
        clock, split = target.clock_ghz * 1e9, occupancy.split_among_warps(config, target)
        a = config.block_m * config.block_k * problem.a.type.width
        b = config.block_n * config.block_k * problem.b.type.width
        sums = split.rows * split.shape[0] * split.columns * split.shape[1]
        own = sums * config.block_k // config.option("slices", 1)
        matrix = 2 * own / (_matrix_flops(problem, target) / target.compute_units / SIMDS)
        matrix += _widening_seconds(config, problem, target)
        if occupancy.without_matrix_units(config):
            matrix = occupancy.accumulator_registers(config, target) * PRODUCT_CLOCKS / clock
            lds: float = (
                2 * (a + b)
                if occupancy.pipeline_stages(config, problem, target) > 1 and not occupancy.has_single_row(config)
                else 0.0
            )
        elif occupancy.async_matrix(config, target):
            matrix += _adding_seconds(config, problem, target, sums)
            own_rows, others = (b, a) if config.option("swap_ab") else (a, b)
            lds = own_rows + others * max(1, occupancy.matrix_sides(config)[0] // 64)
        else:
            matrix /= FALLBACK_RATE if target.has("wgmma") else 1.0
            matrix += _adding_seconds(config, problem, target, sums)
            across_a = 1.0 if problem.a.row_major else _across(split.shape[0], problem.a.type.width, target)
            across_b = _across(split.shape[1], problem.b.type.width, target) if problem.b.row_major else 1.0
            lds = a * split.along_n * across_a + b * split.along_m * across_b + a + b
        run_a = int((config.block_k if problem.a.row_major else config.block_m) * problem.a.type.width)
        run_b = int((config.block_n if problem.b.row_major else config.block_k) * problem.b.type.width)
        row_a, row_b = alignments(problem)
        vector_a, vector_b = gcd(row_a, VECTOR_BYTES), gcd(row_b, VECTOR_BYTES)
        return IterationCost(
            a=a * _lines(row_a, run_a) * LINE_BYTES / run_a,
            b=b * _lines(row_b, run_b) * LINE_BYTES / run_b,
            far_a=a * (1 + ROW_SHARE * _request(row_a, target) / run_a),
            far_b=b * (1 + ROW_SHARE * _request(row_b, target) / run_b),
            matrix=matrix,
            lds=lds / (target.lds_bytes_per_clock * clock),
            issue=(a / vector_a + b / vector_b) * VECTOR_BYTES / (CU_BYTES_PER_CLOCK * clock),
        )


def _adding_seconds(config: Config, problem: Problem, target: Target, sums: int) -> float:
    """Return the seconds in which a warp multiplies its part of a block's sum by scales along K and adds it.

    Where warps have roles, two groups of them take turns with the matrix units, and half of it is hidden.
    """
    if not problem.scale_depth or problem.microscaled or not occupancy.block_sum_registers(config, problem, target):
        return 0.0
    hidden = "warp_roles" in search_facts(config.template).rules and config.num_warps > SIMDS
    return sums / ADDED_A_CLOCK / (target.clock_ghz * 1e9) * (0.5 if hidden else 1.0)


def _widening_seconds(config: Config, problem: Problem, target: Target) -> float:
    """Return the seconds in which a warp that multiplies widens its part of a block of a weight of four bits."""
    if problem.b.type.packed == problem.a.type.packed or "warp_roles" in search_facts(config.template).rules:
        return 0.0
    own = config.block_n * config.block_k / (config.num_warps * target.wave_size)
    return own * WIDENING_INSTRUCTIONS / (target.clock_ghz * 1e9)


def _matrix_flops(problem: Problem, target: Target) -> float:
    """Return the peak rate for the operands; those without matrix instructions are converted and run at fp16's."""
    rates = target.peak_tflops
    if problem.microscaled and not target.has("scaled_matrix"):
        return 1e12 * rates.get("fp16", min(rates.values()))
    slower = max(problem.a.type, problem.b.type, key=lambda d: d.bytes)
    return 1e12 * (target.tflops(slower) if target.supports(slower) else rates.get("fp16", min(rates.values())))


def alignments(problem: Problem) -> tuple[int, int]:
    """Return the bytes, a line at most, of which the stored rows of A and of B are multiples."""
    lead_a, lead_b, _ = problem.leads
    return gcd(int(lead_a * problem.a.type.width), LINE_BYTES), gcd(int(lead_b * problem.b.type.width), LINE_BYTES)


def _across(side: int, width: float, target: Target) -> float:
    """Return the cost of reading elements of `width` bytes across the rows of an operand in LDS, relative to along.

    Where loads pass through registers, rows stay in LDS as they are in memory and every lane fetches single elements.
    The `side` lanes of a matrix instruction's row find theirs side by side; those of other rows fall into the same
    banks, so one row is read a clock. (Newer compilers transpose in registers when a thread holds enough rows.)
    """
    return max(1.0, LDS_BANK_BYTES / (side * width)) if target.has("register_staging") else TRANSPOSE_COST


def _lines(row: int, run: int) -> float:
    """Return the lines that `run` bytes touch on average: one starts at any common multiple of rows and lines."""
    return (run + LINE_BYTES - gcd(row, run)) / LINE_BYTES


def _request(row: int, target: Target) -> int:
    return target.request_bytes * (1 if row == LINE_BYTES else 2)


def machine_loop(built: Artifact | None) -> LoopFacts | None:
    """Return what a compiled config's main loop has, where that was read from the instructions that run."""
    return built.loop if built is not None and built.loop is not None and built.loop.spilled is not None else None


def spilled_bytes(config: Config, problem: Problem, target: Target, built: Artifact | None, wanted: int) -> int:
    """Return the bytes of scratch that a thread writes and reads each K iteration if it needs `wanted` registers."""
    if built is not None and built.status == "ok":
        if (loop := machine_loop(built)) is not None:
            return (loop.spilled or 0) // 2
        # Registers that the loop does not touch are spilled first, and that is free.
        return max(0, built.spills - 4 * occupancy.BOOKKEEPING_REGISTERS)
    unused = 0 if target.has("matrix_instr_nonkdim") else occupancy.BOOKKEEPING_REGISTERS  # in the loop
    return 4 * _excess_registers(config, problem, target, wanted - unused)


def _excess_registers(config: Config, problem: Problem, target: Target, need: int) -> int:
    """Return the registers the K loop needs beyond those a thread may have; masks and narrow loads need more."""
    limit, held = occupancy.register_limit(config, target), occupancy.accumulator_registers(config, target)
    if occupancy.async_matrix(config, target) and held >= limit and not target.has("tensor_memory"):
        return held  # an asynchronous instruction needs all of its accumulators at once, so all are spilled each time
    waiting = occupancy.staging_registers(config, problem, target)
    need += waiting // 2 if problem.k % config.block_k else 0
    need += waiting if any(row % VECTOR_BYTES for row in alignments(problem)) else 0
    return max(0, need - limit)

"""The ten rules of ROCm Triton's tune_gemm, defects included, to compare counts with it.

They answer for kernels without masks along M and N and ask for divisibility; `tritongemm.search.pruning.rules.RULES` do
neither.
Source: ROCm/triton python/perf-kernels/tools/tune_gemm (MIT), `prune_configs`.
"""

from __future__ import annotations

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.pruning.rules import Rule
from tritongemm.search.pruning.rules.resources import lds


def _nonkdim(config: Config) -> int:
    return config.option("matrix_instr_nonkdim") or 16


def mfma(config: Config, problem: Problem, target: Target) -> str | None:
    """Matrix instructions of 32 only where M and N both reach 32."""
    most = 16 if problem.m < 32 or problem.n < 32 else 32
    return f"nonkdim {_nonkdim(config)} > {most}" if _nonkdim(config) > most else None


def least_tile(config: Config, problem: Problem, target: Target) -> str | None:
    """A tile has at least 64 elements."""
    area = config.block_m * config.block_n
    return f"BM*BN {area} < 64" if area < 64 else None


def block_holds_mfma(config: Config, problem: Problem, target: Target) -> str | None:
    """A block is at least as long as the side of the matrix instruction."""
    side, block = _nonkdim(config), min(config.block_m, config.block_n)
    return f"block {block} < nonkdim {side}" if block < side else None


def small_size(config: Config, problem: Problem, target: Target) -> str | None:
    """A size that one matrix instruction covers takes a block of just that side."""
    side = _nonkdim(config)
    for name, size, block in (("M", problem.m, config.block_m), ("N", problem.n, config.block_n)):
        if size <= side and block != side:
            return f"{name} {size} <= nonkdim {side} but B{name} {block}"
    return None


def twice_size(config: Config, problem: Problem, target: Target) -> str | None:
    """A block is at most twice the size it covers, unless it is the smallest."""
    for name, size, block in (("M", problem.m, config.block_m), ("N", problem.n, config.block_n)):
        if block > 2 * size and block != 16:
            return f"B{name} {block} > 2*{size}"
    return None


def split_needed(config: Config, problem: Problem, target: Target) -> str | None:
    """Split-K is for a small M or N and a long K."""
    needed = (problem.m < 64 or problem.n < 64) and problem.k > 1024
    return f"split-K {config.split_k} not needed" if config.split_k != 1 and not needed else None


def split_divides(config: Config, problem: Problem, target: Target) -> str | None:
    """Splits of whole blocks must divide K."""
    step = config.split_k * config.block_k
    return f"K {problem.k} % {step} != 0" if config.split_k != 1 and problem.k % step else None


def group_size(config: Config, problem: Problem, target: Target) -> str | None:
    """A group of rows of tiles has no more rows than C."""
    rows = config.group_m * config.block_m
    return f"group_m*BM {rows} > M {problem.m}" if config.group_m != 1 and rows > problem.m else None


def large(config: Config, problem: Problem, target: Target) -> str | None:
    """Large problems want large blocks that divide them, and four warps."""
    if problem.m < 2048 or problem.n < 2048:
        return None
    if min(config.tile) < 64 or config.num_warps < 4:
        return f"large GEMM: block {min(config.tile)} < 64 or {config.num_warps} warps < 4"
    even = problem.m % config.block_m == 0 and problem.n % config.block_n == 0
    return None if even else f"large GEMM: {problem.m}x{problem.n} % {config.block_m}x{config.block_n} != 0"


TUNE_GEMM_RULES = (
    Rule("split_needed", split_needed),
    Rule("mfma", mfma),
    Rule("least_tile", least_tile),
    Rule("block_holds_mfma", block_holds_mfma),
    Rule("small_size", small_size),
    Rule("twice_size", twice_size),
    Rule("split_divides", split_divides),
    Rule("group_size", group_size),
    Rule("lds", lds),
    Rule("large", large),
)

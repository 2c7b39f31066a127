"""Rules about several programs that share one tile along K: splits and how their sums are added up."""

from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.waves import count_tiles

# Partial sums of a tile that fit into a few registers of each thread; more of them are not polled for.
POLLED_SUMS = 2048
# Most warps of a compute unit, of programs that widen a weight for a few rows.
SLICED_WARPS, FEW_ROWS = 32, 64


def split_k(config: Config, problem: Problem, target: Target) -> str | None:
    """Splits must shorten the longest chain of K blocks on a compute unit by a quarter, or their sum never pays."""
    split = config.split_k
    if split == 1:
        return None
    tiles, units = count_tiles(config, problem), target.compute_units
    # Programs that widen a weight are small: for 1 to 32 rows 7 to 28 warps a unit were best on an H200.
    small = config.option("slices") > 0 and problem.m <= FEW_ROWS
    most = SLICED_WARPS // config.num_warps if small else 4
    if tiles * split > most * units:
        return f"split-K {split} makes {tiles * split} programs for {units} CUs"
    if problem.k < 2 * split * config.block_k:
        return f"K {problem.k} < 2 blocks of {config.block_k} for each of {split} splits"
    if small:
        return None
    if tiles >= units:
        return f"split-K {split}: {tiles} tiles fill {units} CUs"
    rounds = cdiv(tiles * split, units)
    return f"split-K {split}: {rounds} rounds of 1/{split} K" if 4 * rounds > 3 * split else None


def polled_reduction(config: Config, problem: Problem, target: Target) -> str | None:
    """Looking for partial sums until they are there pays while they are few; others are counted.

    On an H200 it shortened 16 x 1280 x 8192 in tiles of 16 x 64 by 15 %, tiles of 64 x 32 by 1 to 3 %, those of 64 x 64
    by nothing, and made those of 128 x 64 4 to 7 % slower: looking takes bandwidth from programs that still multiply.
    """
    poll = config.option("poll", -1)
    if poll < 0:  # the template does not have it; to list all options would be to read them
        return None
    wanted = config.split_k > 1 and config.block_m * config.block_n <= POLLED_SUMS
    if poll == wanted:
        return None
    return f"{config.block_m * config.block_n} sums of {config.split_k} splits, limit {POLLED_SUMS}"

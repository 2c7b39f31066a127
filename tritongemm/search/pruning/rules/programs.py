"""Rules about the programs of a launch: splits along K, what starts early, and programs without matrix instructions."""

from math import ceil

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model import occupancy
from tritongemm.search.cost_model.waves import count_tiles
from tritongemm.search.pruning.rules.persistent import RING_SLOTS_LIMIT

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


# In problems of more rows (or columns) the matrix units matter as much as memory, and an early start gains nothing.
EARLY_START_ROWS = 64
# In problems of more rows (or columns) what comes before the first product hardly matters.
FETCH_AHEAD_ROWS = 256
# Blocks that the warp that fetches brings into L2 ahead of a ring of the usual depth, by the rows (or columns) of
# problems. On an H100 128 x 7168 x 2048 in tiles of 128 x 64 took 7.8 us with four, 8.5 with none and 8.4 with eight;
# 256 x 7168 x 2048 in pairs of 128 x 128 9.6 with two, 9.8 with four and 10.3 with none. On an H200 448 x 2560 x 8192
# took 29.8 us with two and 30.0 with none, 1024 x 1280 x 8192 31.0 and 31.2.
FETCHED_AHEAD = ((128, 4), (1024, 2))


def overlap(config: Config, problem: Problem, target: Target) -> str | None:
    """What a program does before the last kernel has ended pays where there is little to multiply.

    What is left to hide is short: the end of a sum, the programs' own start. On an H200 other combinations than these
    gained nothing, or lost.
    """
    if config.option("ahead", -1) < 0:  # the template does not have it; to list all options would be to read them
        return None
    if "warp_roles" in search_facts(config.template).rules:
        # The warp that fetches starts early by itself, and so can its first weights.
        ahead, rows = config.option("ahead"), min(problem.m, problem.n)
        usual = next((blocks for limit, blocks in FETCHED_AHEAD if rows <= limit), 0)
        if usual and config.num_stages > RING_SLOTS_LIMIT:
            return None if ahead >= usual else f"{ahead} blocks ahead of {config.num_stages} slots"
        return f"{ahead} blocks ahead rather than {usual}" if ahead != usual else None
    ahead, early, split = config.option("ahead"), config.option("early"), config.split_k > 1
    rows = min(problem.m, problem.n)
    if rows > FETCH_AHEAD_ROWS or not target.has("launch_overlap"):
        return f"{rows} rows > {FETCH_AHEAD_ROWS} for fetching ahead" if ahead or early else None
    if rows > EARLY_START_ROWS and early:
        return f"{rows} rows > {EARLY_START_ROWS} for an early start"
    if early and problem.fold > 1:
        return "behind gate and up no kernel starts early"
    if config.option("slices", 1) > 1 and config.num_stages == 1:
        # Straight into registers: on an H200 1 x 14336 x 8192 took 18.8 us so, and 19.8 with two blocks ahead.
        return f"{ahead} blocks ahead of loads into registers" if ahead else None
    if occupancy.without_matrix_units(config):
        apart = problem.fold == 1 and (ahead > 0) != (early > 0)
        return "blocks ahead and an early start go together" if apart else None
    usual = int(search_facts(config.template).slow_start or split)  # slow to start, or with a sum at the end
    if not early:
        return f"{ahead} blocks ahead rather than {usual}" if ahead != usual else None
    # Neighbours that read the same weights share requests to L2 while they keep in step, and these would start apart.
    extent, block = min((problem.m, config.block_m), (problem.n, config.block_n))
    if (readers := ceil(extent / block)) > 1:
        return f"an early start of {readers} tiles that read the same blocks"
    # Programs of the next kernel go where there is most room: on compute units that are idle now, two on each.
    programs, units = count_tiles(config, problem) * config.split_k, target.compute_units
    usual = 0 if 4 * programs <= 3 * units else 2 if programs <= units else 1
    if usual and ahead == usual:
        return None
    return f"an early start, {ahead} blocks ahead, of {programs} programs on {units} CUs"


# Rows of one matrix instruction: a problem of more wastes nothing on matrix units.
MATRIX_ROWS = 16


def vector_rows(config: Config, problem: Problem, target: Target) -> str | None:
    """Without matrix instructions only a few rows are worth it."""
    few = min(problem.m, problem.n)
    return f"{few} rows > {MATRIX_ROWS} for a kernel without matrix instructions" if few > MATRIX_ROWS else None


def gemv_prefetch(config: Config, problem: Problem, target: Target) -> str | None:
    """What goes straight to the registers that multiply is not staged."""
    deep = occupancy.has_single_row(config) and config.option("prefetch", 1) > 1
    return f"prefetch {config.option('prefetch')} for a single row of A" if deep else None


def vector_registers(config: Config, problem: Problem, target: Target) -> str | None:
    """Products of an entire block stay in registers until the end."""
    held, limit = occupancy.accumulator_registers(config, target), occupancy.register_limit(config, target)
    return f"{held} products >= {limit} registers" if held >= limit else None

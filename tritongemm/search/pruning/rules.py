"""The rules of pruning: each looks at one config and answers None, or the reason to drop it with its numbers.

Kernels mask what does not divide, so no rule asks M, N or K to be a multiple of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import (
    MATRIX_K_BYTES,
    accumulators,
    lds_bytes,
    register_limit,
    sides,
    single,
    staging,
    vector,
)
from tritongemm.search.cost_model.waves import WARP_ROLES, tiles_of
from tritongemm.search.pruning.rules_rounds import groups, ring, share, stream_k, swapped, two_parts

POLLED_SUMS = 2048  # of a tile, which fit into a few registers of each thread
LEAST_GROUP = 4  # rows of tiles, where there are as many
EARLY_ROWS = 64  # more of them, and the matrix units matter as much as memory
AHEAD_ROWS = 256  # more of them, and what comes before the first product hardly matters
MOST_ELEMENTS = 512  # of a block that one thread loads; on an H200 none of these came within 3 % of the best
USUAL_STAGES = 6
VECTOR_ROWS = 16  # a matrix instruction's rows: from here on it wastes nothing

Check = Callable[[Config, Problem, Target], str | None]


@dataclass(frozen=True)
class Rule:
    """One reason to drop a config.

    Attributes:
        name: key of the counts.
        check: gives the reason, or None to keep.
        templates: the only templates it judges; empty for all.
    """

    name: str
    check: Check
    templates: tuple[str, ...] = ()


def _up(size: int, least: int) -> int:
    """Smallest power of two that holds `size`, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def fits_m(config: Config, problem: Problem, target: Target) -> str | None:
    """A block more than half empty costs what a smaller one would not; warp groups come in 64 rows."""
    instruction = 64 if target.has("wgmma") or target.has("tensor_memory") else 16
    limit = _up(problem.m, 1 if vector(config) else instruction)
    return f"BM {config.block_m} > {limit} that hold M {problem.m}" if config.block_m > limit else None


def fits_n(config: Config, problem: Problem, target: Target) -> str | None:
    limit = _up(problem.n, 16)
    return f"BN {config.block_n} > {limit} that hold N {problem.n}" if config.block_n > limit else None


def fits_k(config: Config, problem: Problem, target: Target) -> str | None:
    limit = _up(problem.k, 32)
    return f"BK {config.block_k} > {limit} that hold K {problem.k}" if config.block_k > limit else None


def dot_k(config: Config, problem: Problem, target: Target) -> str | None:
    """A matrix instruction takes at least 32 bytes along K, fp32 excepted: Triton wants 16 elements of any type."""
    width = min(problem.a.bytes, problem.b.bytes)
    least = max(16, MATRIX_K_BYTES // width)
    return f"BK {config.block_k} < {least} of one dot" if config.block_k < least else None


def short_rows(config: Config, problem: Problem, target: Target) -> str | None:
    """Loads of less than 64 bytes of a row waste most of each cache line.

    Of 16-bit operands that both lie along K, Hopper's matrix units want 128: in the whole spaces of ten sizes on an H200 no
    shorter block came within 10 % of the best. With B along N one came within 3 %; other widths were not measured.
    """
    row = config.block_k * max(problem.a.bytes, problem.b.bytes)
    measured = problem.row_major_a and not problem.row_major_b and problem.a.bytes == problem.b.bytes == 2
    least = 128 if measured and target.has("wgmma") else 64
    return f"{row} B of a row of K < {least} B" if row < least and problem.k > config.block_k else None


def small_tile(config: Config, problem: Problem, target: Target) -> str | None:
    """Where square tiles of 32 or 64 fill the device many times, smaller ones only load more."""
    for side in (64, 32):
        m, n = min(side, _up(problem.m, 16)), min(side, _up(problem.n, 16))
        if config.block_m >= m and config.block_n >= n:
            continue
        tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
        if tiles >= 4 * target.compute_units:
            wide = f"{config.block_m}x{config.block_n} < {m}x{n}"
            return f"{wide}, which makes {tiles} tiles for {target.compute_units} CUs"
    return None


def group_m(config: Config, problem: Problem, target: Target) -> str | None:
    """A group of more rows of tiles than there are changes nothing; nor does grouping a single column.

    A few rows are best walked together, even where all tiles are under way at once: neighbours that load the same block
    at the same time share one request to L2. On an H200 256 x 8192 x 3584 took 26.9 us in tiles of 128 x 128 and 23.1 in
    pairs of them, 64 x 7168 x 8192 46 us in tiles of 32 x 128 and 32 in pairs. Of many rows, pairs were never the best.
    """
    group, rows, columns = config.group_m, -(-problem.m // config.block_m), -(-problem.n // config.block_n)
    if min(rows, columns) == 1:
        return None if group == 1 else f"group_m {group} with {rows} x {columns} tiles"
    whole = 1 << (rows - 1).bit_length()
    if group > whole:
        return f"group_m {group} > {rows} tiles along M"
    if target.xcds > 1 or (group == 1 and rows > 2 * LEAST_GROUP):
        return None
    least = min(whole, LEAST_GROUP)
    return f"group_m {group} of {rows} rows of tiles, {least} are faster" if group < least else None


def split_k(config: Config, problem: Problem, target: Target) -> str | None:
    """Splits must shorten the longest chain of K blocks on a compute unit by a quarter, or their sum never pays."""
    split = config.split_k
    if split == 1:
        return None
    tiles, units = tiles_of(config, problem), target.compute_units
    if tiles * split > 4 * units:
        return f"split-K {split} makes {tiles * split} programs for {units} CUs"
    if problem.k < 2 * split * config.block_k:
        return f"K {problem.k} < 2 blocks of {config.block_k} for each of {split} splits"
    if tiles >= units:
        return f"split-K {split}: {tiles} tiles fill {units} CUs"
    rounds = -(-tiles * split // units)
    return f"split-K {split}: {rounds} rounds of 1/{split} K" if 4 * rounds > 3 * split else None


def few_instructions(config: Config, problem: Problem, target: Target) -> str | None:
    """A warp without a matrix instruction of its own idles; along K counts, since warps also share the loading."""
    side = config.option("matrix_instr_nonkdim") or 16
    m, n = (side, side) if target.has("matrix_instr_nonkdim") else (16, 8)
    k = config.block_k * max(problem.a.bytes, problem.b.bytes) // MATRIX_K_BYTES
    count = (config.block_m // m) * (config.block_n // n) * max(1, k)
    return f"{config.num_warps} warps for {count} matrix instructions" if config.num_warps > count else None


def warp_group(config: Config, problem: Problem, target: Target) -> str | None:
    """Fewer than 4 warps fall back to the older, slower matrix instructions."""
    if config.num_warps >= 4 or sides(config)[0] < 64 or not (target.has("wgmma") or target.has("tensor_memory")):
        return None
    return f"{config.num_warps} warps < 4 of a warp group"


def accumulator(config: Config, problem: Problem, target: Target) -> str | None:
    """The tile of C and the loads under way live in registers through the whole K loop."""
    limit = register_limit(config, target)
    held, waiting = accumulators(config, target), staging(config, problem, target)
    return f"{held} accumulator + {waiting} staging registers >= {limit}" if held + waiting >= limit else None


def lds(config: Config, problem: Problem, target: Target) -> str | None:
    used = lds_bytes(config, problem, target)
    return f"LDS {used} > {target.lds_bytes}" if used > target.lds_bytes else None


def unrolled(config: Config, problem: Problem, target: Target) -> str | None:
    """A thread's loads of one block are written out one by one: so many spill, and the compiler takes a second."""
    each = config.block_k * max(config.block_m, config.block_n) // (config.num_warps * target.wave_size)
    return f"{each} elements of a block for each thread >= {MOST_ELEMENTS}" if each >= MOST_ELEMENTS else None


def stages(config: Config, problem: Problem, target: Target) -> str | None:
    """A pipeline deeper than the K loop is long only takes LDS."""
    loop = -(-problem.k // (config.block_k * config.split_k))
    deep = config.num_stages > 2 and config.num_stages - 1 > loop
    return f"{config.num_stages} stages for {loop} K blocks" if deep else None


def deep(config: Config, problem: Problem, target: Target) -> str | None:
    """Many stages are for the most that can be under way; anything less is as well had with fewer and larger blocks.

    Blocks from memory that all compute units draw on arrive late: on an H200 256 x 4096 x 4096 in tiles of 64 x 128 x 64
    took 23.6 us with 4 stages, 17.2 with 6 and 15.0 with 9.
    """
    used = lds_bytes(config, problem, target)
    few = config.num_stages > USUAL_STAGES and 4 * used < 3 * target.lds_bytes
    return f"{config.num_stages} stages in {used} bytes of LDS, 3/4 of {target.lds_bytes} wanted" if few else None


def nonkdim_size(config: Config, problem: Problem, target: Target) -> str | None:
    """Matrix instructions of 32 need a block of 32, and half of one is empty where M or N is below that."""
    side = config.option("matrix_instr_nonkdim")
    if side <= 16 or (config.block_m >= side and config.block_n >= side and min(problem.m, problem.n) > 16):
        return None
    return f"nonkdim {side} for a {config.block_m}x{config.block_n} tile of {problem.m}x{problem.n}"


def kpack(config: Config, problem: Problem, target: Target) -> str | None:
    """Kpack 2 reads two matrix instructions' worth of K at once."""
    pack = config.option("kpack", 1)
    if pack <= 1:
        return None
    side = config.option("matrix_instr_nonkdim") or 16
    least = pack * MATRIX_K_BYTES * 16 // side // max(problem.a.bytes, problem.b.bytes)
    return f"kpack {pack} needs BK {least}, not {config.block_k}" if config.block_k < least else None


def vector_rows(config: Config, problem: Problem, target: Target) -> str | None:
    """Without matrix instructions only a few rows are worth it."""
    few = min(problem.m, problem.n)
    return f"{few} rows > {VECTOR_ROWS} for a kernel without matrix instructions" if few > VECTOR_ROWS else None


def straight(config: Config, problem: Problem, target: Target) -> str | None:
    """What goes straight to the registers that multiply is not staged."""
    deep = single(config) and config.option("prefetch", 1) > 1
    return f"prefetch {config.option('prefetch')} for a single row of A" if deep else None


def vector_registers(config: Config, problem: Problem, target: Target) -> str | None:
    """Products of a whole block stay in registers until the end."""
    held, limit = accumulators(config, target), register_limit(config, target)
    return f"{held} products >= {limit} registers" if held >= limit else None


def poll(config: Config, problem: Problem, target: Target) -> str | None:
    """Looking for partial sums until they are there pays while they are few; others are counted.

    On an H200 it shortened 16 x 1280 x 8192 in tiles of 16 x 64 by 15 %, tiles of 64 x 32 by 1 to 3 %, those of 64 x 64 by
    nothing, and made those of 128 x 64 4 to 7 % slower: who looks takes bandwidth from who still multiplies.
    """
    if "poll" not in dict(config.options):
        return None
    sums = config.block_m * config.block_n
    wanted = config.split_k > 1 and sums <= POLLED_SUMS
    return None if config.option("poll") == wanted else f"{sums} sums of {config.split_k} splits, limit {POLLED_SUMS}"


def overlap(config: Config, problem: Problem, target: Target) -> str | None:
    """What a program does before the last kernel has ended pays where there is little to multiply.

    What is left to hide is short: the end of a sum, the programs' own start. On an H200 other combinations than these
    gained nothing, or lost.
    """
    ahead, early, split = config.option("ahead"), config.option("early"), config.split_k > 1
    rows = min(problem.m, problem.n)
    if rows > AHEAD_ROWS or not target.overlap:
        return f"{rows} rows > {AHEAD_ROWS} for fetching ahead" if ahead or early else None
    if rows > EARLY_ROWS and early:
        return f"{rows} rows > {EARLY_ROWS} for an early start"
    if vector(config):
        return "blocks ahead and an early start go together" if (ahead > 0) != (early > 0) else None
    usual = int(config.template == "tma" or split)  # slow to start, or with a sum at the end
    if not early:
        return f"{ahead} blocks ahead rather than {usual}" if ahead != usual else None
    # Neighbours that read the same weights share requests to L2 while they keep in step, and these would start apart.
    extent, block = min((problem.m, config.block_m), (problem.n, config.block_n))
    if (readers := ceil(extent / block)) > 1:
        return f"an early start of {readers} tiles that read the same blocks"
    # Programs of the next kernel go where there is most room: on compute units that are idle now, two on each.
    programs, units = tiles_of(config, problem) * config.split_k, target.compute_units
    level = 9 * units < 10 * programs <= 10 * units
    return None if ahead and level else f"an early start, {ahead} blocks ahead, of {programs} programs on {units} CUs"


# Rules about matrix instructions fed from tiles in LDS; the rest hold for any template.
_MATRIX = ("tile", "tma", "persistent", "stream_k", *WARP_ROLES)
_POINTERS = ("tile", "stream_k")
_VECTOR = ("gemv",)

# Cheap and strong ones first.
RULES = (
    Rule("group_m", group_m),
    Rule("split_k", split_k),
    Rule("poll", poll),
    Rule("overlap", overlap),
    Rule("fits_m", fits_m),
    Rule("fits_n", fits_n),
    Rule("fits_k", fits_k),
    Rule("dot_k", dot_k, _MATRIX),
    Rule("short_rows", short_rows, _MATRIX),
    Rule("small_tile", small_tile, _MATRIX),
    Rule("warp_group", warp_group, _MATRIX),
    Rule("groups", groups, WARP_ROLES),
    Rule("swapped", swapped, ("ws_tma_swapped",)),
    Rule("two_parts", two_parts, WARP_ROLES),
    Rule("share", share, WARP_ROLES),
    Rule("ring", ring, WARP_ROLES),
    Rule("stream_k", stream_k, ("stream_k",)),
    Rule("lds", lds, _MATRIX),
    Rule("unrolled", unrolled, _POINTERS),
    Rule("accumulator", accumulator, _MATRIX),
    Rule("nonkdim_size", nonkdim_size, _MATRIX),
    Rule("few_instructions", few_instructions, _MATRIX),
    Rule("kpack", kpack, _MATRIX),
    Rule("stages", stages),
    Rule("deep", deep, ("tma",)),
    Rule("vector_rows", vector_rows, _VECTOR),
    Rule("straight", straight, _VECTOR),
    Rule("vector_registers", vector_registers, _VECTOR),
)

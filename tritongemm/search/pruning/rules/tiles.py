"""Rules about the tile: how it covers C and K, and what its matrix instructions want of it."""

from tritongemm.codegen.geometry import MX_INSTRUCTION_DEPTH, batch_fault, complete_runs, distant_rows, split_piece
from tritongemm.codegen.template_facts import kernel_template
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv, power_of_two
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import MATRIX_K_BYTES, matrix_sides, without_matrix_units
from tritongemm.search.cost_model.waves import count_tiles

# Of as many rows of tiles or more, this many are walked together at least.
LEAST_GROUP_ROWS = 4
# Most rows for which warps share blocks of K; the fewest of such warps that keep a unit's loads under way; most columns
# of their tiles, such warps, elements along K of each where a group's factors allow it, and most stages, as they were
# fastest with; one stage more above the next limit of rows.
SLICED_ROWS, LEAST_WARPS, SLICED_COLUMNS, SLICES, SLICE, SLICE_STAGES = 16, 7, 64, 2, 128, 3
# Most numbers of a weight of which tiles of one row were the fastest.
ONE_ROW = 2**25
# Most rows for which groups of four warps with columns of their own were never the fastest.
UNSLICED_ROWS = 8
# Columns of each of their warps, or with few rows two or four times as many; the most of such rows; the most of a block
# along K.
WARP_COLUMNS, WIDE_WARP_ROWS, UNSLICED_K = 16, 32, 256
# With a weight of four bits to widen: fewest and most rows of tiles; warps that are fast in tiles wider than this side
# alone, and of tiles as high as that in those of this size.
LEAST_WIDENED_ROWS, WIDENED_ROWS, WIDENING_WARPS, WIDENED_SIDE, WIDENED_TILE = 16, 128, 8, 64, 128 * 128
# Most rows whose tiles hold no more than there are, and the fewest stages for them.
CLOSE_ROWS, CLOSE_STAGES = 64, 3


def fits_m(config: Config, problem: Problem, target: Target) -> str | None:
    """A block more than half empty costs what a smaller one would not; warp groups come in 64 rows."""
    instruction = 64 if target.has("wgmma") or target.has("tensor_memory") else 16
    limit = max(1 if without_matrix_units(config) else instruction, power_of_two(problem.m))
    return f"BM {config.block_m} > {limit} that hold M {problem.m}" if config.block_m > limit else None


def fits_n(config: Config, problem: Problem, target: Target) -> str | None:
    """A block along N holds at most twice the columns there are, 16 at least: the rest would be empty."""
    limit = max(16, power_of_two(problem.n))
    return f"BN {config.block_n} > {limit} that hold N {problem.n}" if config.block_n > limit else None


def fits_k(config: Config, problem: Problem, target: Target) -> str | None:
    """A block along K holds at most twice the elements there are, 32 at least: the rest would be empty."""
    limit = max(MX_INSTRUCTION_DEPTH if problem.microscaled else 32, power_of_two(problem.k))
    return f"BK {config.block_k} > {limit} that hold K {problem.k}" if config.block_k > limit else None


def dot_k(config: Config, problem: Problem, target: Target) -> str | None:
    """A matrix instruction takes at least 32 bytes along K, fp32 excepted: Triton wants 16 elements of any type."""
    least = max(16, int(MATRIX_K_BYTES / min(problem.a.type.width, problem.b.type.width)))
    return f"BK {config.block_k} < {least} of one dot" if config.block_k < least else None


def scale_depth(config: Config, problem: Problem, target: Target) -> str | None:
    """A block along K has one scale a row, and as long a sum as possible before it is multiplied by it."""
    depth, block = problem.scale_depth, config.block_k
    if without_matrix_units(config) or not config.is_generated or problem.microscaled:
        return None
    if problem.b.type.packed > problem.a.type.packed:  # a weight of four bits is multiplied by its scales in registers
        of_a = problem.a.scaling  # in float32 they multiply the sums of blocks
        part = kernel_template(config.template).fragments and depth % block == 0
        split = (block % depth and not part) or (of_a is not None and of_a.dtype == "fp32" and of_a.depth % block)
        return f"BK {block} splits the {depth} elements along K of a scale" if split else None
    wanted = min(depth, max(32, power_of_two(problem.k)))
    return f"BK {block} for scales of {depth} elements along K" if depth and block != wanted else None


def runs(config: Config, problem: Problem, target: Target) -> str | None:
    """A tile has as many columns of gate as of up, and complete blocks of a quantised C."""
    return complete_runs(config, problem, target.compute_units) if config.is_generated else None


def pieces(config: Config, problem: Problem, target: Target) -> str | None:
    """A B whose columns are interleaved is read in complete groups."""
    return split_piece(config, problem) if config.is_generated else None


def batch(config: Config, problem: Problem, target: Target) -> str | None:
    """A descriptor's last block along K reads no rows of the next product of a batch."""
    return batch_fault(config, problem) if problem.batch > 1 and config.is_generated else None


def offsets(config: Config, problem: Problem, target: Target) -> str | None:
    """Offsets inside a tile are added to its corner in 32 bits."""
    return distant_rows(config, problem) if config.is_generated else None


def short_rows(config: Config, problem: Problem, target: Target) -> str | None:
    """Loads of less than 64 bytes of a row waste most of each cache line.

    Of 16-bit operands that both have rows along K, Hopper's matrix units want 128: in the spaces of ten sizes on an
    H200 no shorter block came within 10 % of the best. With B along N one came within 3 %; other widths were not
    measured.
    """
    row = int(config.block_k * max(problem.a.type.width, problem.b.type.width))
    measured = problem.a.row_major and not problem.b.row_major and problem.a.type.width == problem.b.type.width == 2
    least = 128 if measured and target.has("wgmma") else 64
    return f"{row} B of a row of K < {least} B" if row < least and problem.k > config.block_k else None


def small_tile(config: Config, problem: Problem, target: Target) -> str | None:
    """Where square tiles of 32 or 64 fill the device many times, smaller ones only load more."""
    for side in (64, 32):
        m, n = min(side, max(8, power_of_two(problem.m))), min(side, max(16, power_of_two(problem.n)))
        if config.block_m >= m and config.block_n >= n:
            continue
        tiles = cdiv(problem.m, m) * cdiv(problem.n, n) * problem.batch
        if tiles >= 4 * target.compute_units:
            wide = f"{config.block_m}x{config.block_n} < {m}x{n}"
            return f"{wide}, which makes {tiles} tiles for {target.compute_units} CUs"
    return None


def widened_tiles(config: Config, problem: Problem, target: Target) -> str | None:
    """A plain weight of four bits is widened for an A of eight in tiles that hold few more rows than a group has.

    Of 222 sizes of experts on an H200, 8,277 kernels, none of what is dropped here was the fastest. Some took 3.5 times
    as long as the best, and were predicted to be the fastest: eight warps with 64 columns.
    """
    if not (problem.b.type.packed > problem.a.type.packed and problem.a.type.bytes == 1 and target.has("wgmma")):
        return None
    m, n, rows = config.block_m, config.block_n, max(problem.row_counts)
    most = min(WIDENED_ROWS, max(LEAST_WIDENED_ROWS, 1 << rows.bit_length()))
    if m > most:
        return f"BM {m} > {most} for groups of up to {rows} rows"
    if m == WIDENED_SIDE and config.option("swap_ab", 0):
        return f"swap_ab with BM {m}"
    if config.num_warps == WIDENING_WARPS and (n <= WIDENED_SIDE or (m >= WIDENED_SIDE and m * n < WIDENED_TILE)):
        return f"{WIDENING_WARPS} warps for {m}x{n}, whose weight of four bits they widen"
    return None


def group_m(config: Config, problem: Problem, target: Target) -> str | None:
    """A group of more rows of tiles than there are changes nothing; nor does grouping a single column.

    A few rows are best walked together, even where all tiles are under way at once: neighbours that load the same block
    at the same time share one request to L2. On an H200 256 x 8192 x 3584 took 26.9 us in tiles of 128 x 128 and 23.1
    in pairs of them, 64 x 7168 x 8192 46 us in tiles of 32 x 128 and 32 in pairs. Of many rows, pairs were never the
    best.
    """
    group, rows, columns = config.group_m, cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_n)
    if min(rows, columns) == 1:
        return None if group == 1 else f"group_m {group} with {rows} x {columns} tiles"
    rounded = power_of_two(rows)
    if group > rounded:
        return f"group_m {group} > {rows} tiles along M"
    if target.xcds > 1 or (group == 1 and rows > 2 * LEAST_GROUP_ROWS):
        return None
    least = min(rounded, LEAST_GROUP_ROWS)
    return f"group_m {group} of {rows} rows of tiles, {least} are faster" if group < least else None


def warp_group(config: Config, problem: Problem, target: Target) -> str | None:
    """Fewer than 4 warps fall back to the older, slower matrix instructions."""
    if (
        config.num_warps >= 4
        or config.option("slices", 1) > 1
        or matrix_sides(config)[0] < 64
        or not (target.has("wgmma") or target.has("tensor_memory"))
    ):
        return None
    return f"{config.num_warps} warps < 4 of a warp group"


def few_instructions(config: Config, problem: Problem, target: Target) -> str | None:
    """A warp without a matrix instruction of its own idles; along K counts, since warps also share the loading."""
    side = config.option("matrix_instr_nonkdim") or 16
    m, n = (side, side) if target.has("matrix_instr_nonkdim") else (16, 8)
    k = int(config.block_k * max(problem.a.type.width, problem.b.type.width)) // MATRIX_K_BYTES
    rows, columns = matrix_sides(config)
    count = (rows // m) * max(1, columns // n) * max(1, k)
    return f"{config.num_warps} warps for {count} matrix instructions" if config.num_warps > count else None


def slices(config: Config, problem: Problem, target: Target) -> str | None:
    """Warps that share a block of K are for a few rows, groups of four warps with columns of their own for many.

    Tiles of one row leave more room to loads: of int4 on an H200 6144 x 4096 took 6.0 us so and 6.6 in tiles of eight,
    2560 x 8192 5.7 and 5.9, 8192 x 2048 4.8 and 5.0. Of larger weights they were 1 % faster to 3 % slower.
    """
    shared, held = config.option("slices", 1) > 1, max(8, power_of_two(problem.m))
    several = problem.batch > 1  # perhaps groups, of which some have more rows than most
    if shared and (config.block_m > max(held, SLICED_ROWS * several) or problem.m > SLICED_ROWS):
        return f"slices of K in blocks of {config.block_m} for {problem.m} rows, limit {SLICED_ROWS}"
    one_row = problem.m == 1 and not several and problem.groups is None and problem.n * problem.k <= ONE_ROW
    if config.block_m <= 8 and one_row != (config.block_m < 8):
        return f"tiles of {config.block_m} rows for {problem.m} of a weight of {problem.n} x {problem.k}"
    turns = config.option("turns", 1)
    warps = count_tiles(config, problem) * config.split_k * config.num_warps // turns
    long = not several and problem.k >= 4 * config.split_k * config.block_k
    if warps < LEAST_WARPS * target.compute_units and (turns > 1 or (shared and long)):
        return f"{warps} warps on {target.compute_units} CUs, {LEAST_WARPS} on each wanted"
    if not shared and (problem.m <= UNSLICED_ROWS or config.block_m < min(64, held)):
        return f"no slices of K in blocks of {config.block_m} for {problem.m} rows"
    slice_k = config.block_k // config.option("slices", 1)
    unlike = problem.scale_depth % SLICE == 0 and slice_k != SLICE and problem.k > SLICE
    alone = not several and problem.groups is None
    if shared:
        stages = SLICE_STAGES if alone and problem.m <= UNSLICED_ROWS else SLICE_STAGES + 1
        slow = unlike or config.num_stages > stages or config.block_n > SLICED_COLUMNS * (1 + several)
        slow |= alone and config.num_warps > SLICES
    else:
        wider = config.block_n // config.num_warps // WARP_COLUMNS
        wide = (wider == 4 or (wider == 2 and config.num_warps == 4)) and problem.m <= WIDE_WARP_ROWS
        slow = (config.block_n // config.num_warps != WARP_COLUMNS and not wide) or slice_k > UNSLICED_K
        if alone and problem.m <= CLOSE_ROWS:
            halved = wide and wider == 4 and problem.m > SLICED_ROWS and slice_k == SLICE // 2
            in_parts = wider == 1 and problem.m <= WIDE_WARP_ROWS and config.num_stages == CLOSE_STAGES
            like = halved or (in_parts and slice_k == 2 * SLICE == 2 * problem.scale_depth)
            slow |= config.block_m != held or config.num_stages < CLOSE_STAGES or (unlike and not like)
    shape = f"BN {config.block_n} and {slice_k} along K a warp, {config.num_warps} warps, {config.num_stages} stages"
    return f"{shape}: never the fastest" if slow else None


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
    least = int(pack * MATRIX_K_BYTES * 16 // side / max(problem.a.type.width, problem.b.type.width))
    return f"kpack {pack} needs BK {least}, not {config.block_k}" if config.block_k < least else None

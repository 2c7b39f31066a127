"""Rules about programs that share work out themselves: rings of slots, tiles cut along K, tiles that fill rounds."""

from collections.abc import Callable, Sequence

from tritongemm.codegen import template_facts
from tritongemm.codegen.geometry import Need, list_needs, unmet_need
from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import accumulator_registers, block_sum_registers, matrix_sides, slot_lines
from tritongemm.search.cost_model.waves import PARTIAL_BYTES, count_tiles

Check = Callable[[Config, Problem, Target], "str | None"]

# Registers of a thread that hold sums and factors of a program in which other warps fetch, by the warps that multiply:
# of two groups of 4 each thread has 232, of three 152, and of one 216, so that two programs fit on a compute unit.
SUMS_LIMITS = {4: 184, 8: 200, 12: 130}
# Slots of a ring that were enough on an H200, and where there are so few rows (or columns) that weights alone take the
# time, which come in faster the more of them are under way. Beyond ten, search spaces name every other depth.
RING_SLOTS_LIMIT, DEEP_RING_LIMIT = 8, 16
FEW_ROWS = 256
# Bytes along K of a block of such a ring, which the copy engine fetches in two pieces of 128; rows (or columns) of
# problems and columns of tiles up to which twice as many gain.
MOST_BLOCK_BYTES, FEWEST_ROWS = 256, 16
# The same of a padded tile, that has no factors: 128 x 224 with two sums of all was a tenth faster than any other on an
# H200, at 1024x7168x16384 in fp8.
PADDED_SUMS_LIMIT = 224
# Rows of the highest tile, columns by which it fetches less than others do and whose sums leave registers for the rest,
# rounds that are many, and how much longer they may be for that.
HIGH_ROWS, HIGH_WIDTHS, MANY_ROUNDS, LONGER_ROUNDS = 256, range(160, 177), 4, 1.02
# Columns of whose sums three groups of warps have room for 64 rows each.
THIRD_COLUMNS = 192
# Rows from which pairs of programs gained on an H200, and rows or columns of tiles of which one more is little.
PAIRED_ROWS, PAIRED_TILES = 128, 9
PAIRED_WIDTH = 128  # columns of tiles, from which programs gained by sharing A where several rows of tiles read B
ADJACENT_ROWS = 8  # of tiles, up to which adjacent programs gained by reading the same block of B
# bytes of LDS for barriers, and for what warps read at the start
RING_BARRIER_BYTES = 512


def ring(config: Config, problem: Problem, target: Target) -> str | None:
    """The ring between the warps that fetch and multiply has as many slots as fit beside the stored part of C."""
    rows, width = matrix_sides(config)
    template = template_facts.kernel_template(config.template)
    at_once = template_facts.columns_at_once(problem)
    rest, padded = template.value(config, "tail", at_once), template_facts.padded_columns(config, at_once)
    slot = slot_lines(config, problem) * problem.a.type.bytes * config.block_k
    slot += factor_bytes(config, problem)
    sharers = config.split_k if template_facts.exchanges_sums(config, at_once) else 1
    sums = rows * width * PARTIAL_BYTES * (sharers - 1) // sharers

    def beside(parts: int) -> int:
        columns = (width - rest) // parts
        if padded:
            share = width // sharers
            step, wide = share & -share, min(64, padded // 2 // sharers)  # columns of the last pieces of C, and others
            columns = (cdiv(share // wide, parts) * wide + cdiv(share % wide // step, parts) * step) * sharers
        elif rest not in (columns, width - rest):  # what is stored in equal parts goes through one place
            columns += rest
        groups = 2 if config.option("alternate") else 1  # with a tile each
        return groups * rows * (columns // sharers) * problem.c.type.bytes + sums + RING_BARRIER_BYTES

    slots, parts, room = config.num_stages, config.option("epilogue_parts", 1), target.lds_bytes
    stored = beside(parts)
    if slots * slot + stored > room:
        return f"LDS {slots * slot + stored} > {room}"
    if parts > 1 and slots * slot + beside(parts // 2) <= room:
        return f"{slots} slots fit without storing C in {parts} parts"
    loop = cdiv(problem.k, config.block_k * config.split_k)
    few = min(problem.m, problem.n) <= FEW_ROWS
    if slots > RING_SLOTS_LIMIT and not (few and loop >= slots):
        return (
            f"{slots} slots for {problem.m} x {problem.n} and {loop} K blocks: that many are for up to {FEW_ROWS} rows"
        )
    step = 1 if slots < 10 else 2
    # Of few rows a ring of the usual depth races the deepest: which one wins differs from size to size.
    enough = DEEP_RING_LIMIT if slots > RING_SLOTS_LIMIT else RING_SLOTS_LIMIT
    deeper = slots < min(enough, max(2, loop)) and (slots + step) * slot + stored <= room
    # Programs of few warps that are cut along K are worth two on a compute unit.
    half = room // 2 - stored
    halved = config.num_warps == 4 and config.split_k > 1 and slots * slot <= half < (slots + 1) * slot
    return f"{slots} slots where {slots + step} fit" if deeper and not halved else None


def long_blocks(config: Config, problem: Problem, target: Target) -> str | None:
    """Blocks of 256 numbers of one byte along K are for few rows: warps that multiply wait less often for a block.

    On an H200 in fp8 64 x 4096 x 7168 took 9.6 us in blocks of 256 and 9.85 in blocks of 128. 256 x 4096 x 7168 took
    15.0 and 14.2 us: where larger tiles win, only four of the longer blocks fit into shared memory. In bf16 and tiles
    of 64 x 16 1 x 1280 x 8192 took 8.9 us in blocks of 256 and 9.5 in blocks of 128, 64 rows 11.8 and 11.5.
    """
    if config.block_k <= MOST_BLOCK_BYTES // 2:
        return None
    block, rows = config.block_k * problem.a.type.bytes, min(problem.m, problem.n)
    fewest = max(rows, config.block_n) <= FEWEST_ROWS
    if block > MOST_BLOCK_BYTES * (1 + fewest):
        return f"{block} B along K in a block, more than {MOST_BLOCK_BYTES}"
    if rows <= FEW_ROWS:
        return None
    return f"blocks of {config.block_k} along K for {problem.m} x {problem.n}: more than {FEW_ROWS} rows"


def factor_bytes(config: Config, problem: Problem) -> int:
    """Return the bytes of the scale factors that change along K for one block of K of a tile."""
    sides = ((problem.a.scaling, config.block_m), (problem.b.scaling, config.block_n))
    return sum(4 * (extent if e.rows == 1 else 2) for e, extent in sides if e is not None and e.depth)


def groups(config: Config, problem: Problem, target: Target) -> str | None:
    """A group of 4 warps multiplies 64 rows at a time; three groups have a third of the registers each."""
    rows, columns = matrix_sides(config)
    warps = {64: 4, 192: 12}.get(rows, 8)
    if warps == 12 and not problem.scale_depth and columns > THIRD_COLUMNS:
        return f"{columns} columns, whose sums do not fit into the registers of one of three groups of warps"
    return f"{config.num_warps} warps for {rows} rows" if config.num_warps != warps else None


def sides(config: Config, problem: Problem, target: Target) -> str | None:
    """No tile of the kernel can have these sides: of two powers of two, or padded to one."""
    return template_facts.odd_block(config)


def needs(config: Config, problem: Problem, target: Target) -> str | None:
    """The kernel itself has needs, such as columns that share scales."""
    return unmet_need(config, problem, target.compute_units)


def each_need(template: str) -> Sequence[Check]:
    """Return the checks of a template's `needs`, each of which reads little of a config."""

    def check(need: Need) -> Check:
        return lambda config, problem, target: need(config, problem, target.compute_units)

    return [check(need) for need in list_needs(template)]


def factors(config: Config, problem: Problem, target: Target) -> str | None:
    """The sum of a block of K and its factors must fit into registers beside the sum of all.

    Where each column has a factor of its own, a thread keeps those of its columns: a quarter of the tile's.
    """
    own = block_sum_registers(config, problem, target)
    if not own:
        return None
    columns = matrix_sides(config)[1] - template_facts.kernel_template(config.template).value(
        config, "tail", template_facts.columns_at_once(problem)
    )
    of_columns = problem.a.scaling if config.option("swap_ab") else problem.b.scaling
    each = of_columns is not None and of_columns.depth > 0 and of_columns.rows == 1
    held = accumulator_registers(config, target) + own + (columns // 4 if each else 0)
    limit = SUMS_LIMITS.get(config.num_warps, max(SUMS_LIMITS.values()))
    if template_facts.padded_columns(config, template_facts.columns_at_once(problem)):
        limit = max(limit, PADDED_SUMS_LIMIT)
    return f"{held} registers of sums and factors > {limit}" if held > limit else None


def two_parts(config: Config, problem: Problem, target: Target) -> str | None:
    """A tile that is no power of two wide costs a little more to multiply: it must leave less of a round empty than a
    wider one, and no more than a narrower one, which loads more. As many narrower ones would not hold all columns.

    Of 256 rows none is wider. On an H200 gate and up of 1024 x 28672 x 4096 took 300.0 us in tiles of 256 x 176, and
    cuBLASLt's product in such tiles 299.3; of its best at 4096 and 8192 rows four of six had 256 x 160 or 176, and were
    1 to 3 % faster than ours of 128 x 256.
    """
    rows, width = matrix_sides(config)
    rest = template_facts.tail(width)
    if not rest:
        return None
    padded = template_facts.padded_columns(config, template_facts.columns_at_once(problem))
    small = problem.groups is None and not config.option("swap_ab") and (rows < 128 or width < 192)
    if small and problem.scale_depth and not padded:
        # On an H200 none of these came within 3 % of the best at 35 sizes: their sums are scaled one after the other.
        return f"tiles of {rows} x {width} in two parts, whose sums are scaled one after the other"
    if template_facts.columns_at_once(problem) < template_facts.MOST_PADDED and not padded and 2 * rest == width - rest:
        return None  # wide tiles are computed in parts anyway
    if config.option("share"):
        return f"tiles {width} wide and cut along K: either fills a round"

    m, n = (problem.n, problem.m) if config.option("swap_ab") else (problem.m, problem.n)

    def rounds(width: int) -> int:
        tiles = cdiv(m, rows) * cdiv(n, width) * config.split_k
        return cdiv(tiles, target.compute_units) * width

    if padded and width > (least := round_up(cdiv(n, cdiv(n, width)), template_facts.PADDED_STEP)):
        return f"{n} columns in tiles {width} wide: as many tiles {least} wide hold them"
    body, wider = (padded // 2, padded) if padded else (width - rest, 2 * (width - rest))
    many = cdiv(m, rows) * cdiv(n, width) > MANY_ROUNDS * target.compute_units
    if padded and many and rows == HIGH_ROWS and width in HIGH_WIDTHS:
        # Of many rounds no width saves a tenth. These save bytes: no other tile fetches as few for a product.
        longer = rounds(width) > LONGER_ROUNDS * rounds(body)
        return f"rounds of tiles {width} wide are longer than of {body} wide" if longer else None
    for narrower in range(body, width, template_facts.PADDED_STEP) if padded else (body,):
        if rounds(width) > rounds(narrower):
            return f"rounds of tiles {width} wide are longer than of {narrower} wide"
    if 10 * rounds(width) > 9 * rounds(wider):
        return f"rounds of tiles {width} wide are no shorter than of {wider} wide"
    return None


def swapped(config: Config, problem: Problem, target: Target) -> str | None:
    """Exchanging the operands pays where it makes fewer tiles of the same shape: of rows that are no multiple of 64.

    Of as many it pays where several rows of tiles read the same blocks of B, which are wider so: on an H200
    64 x 1280 x 8192 took 10.7 us in tiles of 16 x 64 and 11.5 in tiles of 64 x 16.
    """
    rows, columns = config.block_n, config.block_m
    straight = cdiv(problem.m, rows) * cdiv(problem.n, columns)
    here = cdiv(problem.m, columns) * cdiv(problem.n, rows)
    shared = columns < problem.m <= FEW_ROWS
    return f"{here} tiles, {straight} of {rows}x{columns} are no more" if straight < here + (not shared) else None


def share(config: Config, problem: Problem, target: Target) -> str | None:
    """Tiles are cut along K where they leave a round half empty, and in one way only.

    Up to half a round is cut at the same places of all tiles, so that programs read the same blocks at the same time:
    on an H200 1024 x 5120 x 25600 took 340 us so in bf16 and 366 in equal runs, of int4 343 and 364, x 17408 236 and
    247, 1024 x 9216 x 5120 131.5 and 134.
    """
    units, tiles, kind = target.compute_units, count_tiles(config, problem), config.option("share")
    if not kind:
        return None
    if config.split_k > 1:
        return f"split-K {config.split_k} and tiles cut into equal runs"
    rest, complete = tiles % units, tiles > units
    if not rest:
        return f"{tiles} tiles fill {units} CUs"
    if kind > 1 and not complete:
        return f"{tiles} tiles are less than a round of {units}"
    if kind != 2 and complete and (kind == 3) != (2 * rest <= units):
        return f"{rest} tiles of the last round are {'more' if kind == 3 else 'less'} than half of {units} CUs"
    blocks = tiles * cdiv(problem.k, config.block_k)
    return f"{blocks} K blocks in all for {units} CUs" if blocks < 4 * units else None


def pair(config: Config, problem: Problem, target: Target) -> str | None:
    """Two programs that fetch for each other pay where there are many rows, and a tile for each: they share the larger
    block, so that tiles higher than wide are paired along N. Each then fetches a B of its own, for which the other one
    waits: on an H200 1024 x 1280 x 8192 in tiles of 128 x 80 took 38.2 us so and 31.6 without, 176 x 3072 x 8192 in
    tiles of 88 x 64 25.8 and 20.3. Of 61 such tiles at 39 sizes none came within 3 % of the best.
    """
    if not config.option("pair"):
        return None
    if problem.m < PAIRED_ROWS:
        return f"{problem.m} rows are too few for pairs of programs: fewer than {PAIRED_ROWS}"
    along_n = config.block_m > config.block_n
    if along_n and config.block_n < PAIRED_WIDTH and config.split_k == 1 and problem.m > config.block_m:
        return f"pairs that share A, and fetch {config.block_n} columns of B each: fewer than {PAIRED_WIDTH}"
    tiles = cdiv(problem.n, config.block_n) if along_n else cdiv(problem.m, config.block_m)
    kind = "columns" if along_n else "rows"
    return f"{tiles} {kind} of tiles: one is left without a partner" if tiles % 2 and tiles < PAIRED_TILES else None


def adjacent(config: Config, problem: Problem, target: Target) -> str | None:
    """Consecutive programs are launched on adjacent compute units where a few rows of tiles read the same blocks of B.

    Requests to L2 of two adjacent units for the same block are merged into one. On an H100 in fp8 256 x 7168 x 2048 in
    tiles of 128 x 128 took 9.4 us so, 9.8 us otherwise and 9.6 us where they fetch for each other; 256 x 2112 x 7168 in
    tiles of 64 x 64 with scales along K 11.8 and 12.3. On an H200 in bf16 448 x 2560 x 8192 (6 rows of tiles) took 30.3
    us so and 31.2 otherwise, 1024 x 1280 x 8192 (8 rows) 31.2 and 31.6. Of 64 groups of 256 rows, times 2048 x 768 with
    scales along K, 69.5 us and 74.7.
    """
    if not config.option("adjacent"):
        return None
    rows, group = cdiv(problem.m, config.block_m), config.group_m
    # Rules see a batch of equal products in place of groups of rows (search/typical.py).
    few = 1 < rows <= ADJACENT_ROWS and 1 < group <= min(rows, ADJACENT_ROWS // 2)
    pays = (rows > 1 and group > 1) if problem.batch > 1 else few
    pays |= rows == 1 and bool(config.option("swap_ab"))  # where consecutive programs read the same block of A
    return None if pays else f"adjacent programs of {rows} rows of tiles, in groups of {group}, gain nothing"


def alternate(config: Config, problem: Problem, target: Target) -> str | None:
    """Two groups of warps with every other tile each pay where the end of a tile counts, and a program has several."""
    if not config.option("alternate"):
        return None
    if (config.block_m, config.block_n) != (128, 128):
        return f"tiles of {config.block_m} x {config.block_n}, not 128 x 128, for each group of warps"
    tiles = count_tiles(config, problem)
    return (
        f"{tiles} tiles are less than two for each of {target.compute_units} CUs"
        if tiles < 2 * target.compute_units
        else None
    )


def stream_k(config: Config, problem: Problem, target: Target) -> str | None:
    """Cutting tiles pays where their last round leaves a tenth of the programs' time idle, and K is long enough."""
    programs, tiles = config.option("num_sms") or target.compute_units, count_tiles(config, problem)
    if config.option("share_more") and tiles < programs:
        return f"{tiles} tiles are less than a round of {programs}"
    if 10 * tiles > 9 * programs * cdiv(tiles, programs):
        return f"{tiles} tiles fill {programs} programs"
    blocks = tiles * cdiv(problem.k, config.block_k)
    return f"{blocks} K blocks in all for {programs} programs" if blocks < 4 * programs else None

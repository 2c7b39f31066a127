"""Estimates of a config's LDS, registers and warps before it is compiled, and of the programs that fit on one CU.

The formulas follow the observed allocations of Triton 3.9 (gfx942, gfx950, sm80, sm90, sm100); a compiled `Artifact`
has exact values.
"""

from dataclasses import dataclass
from math import ceil

from tritongemm.codegen import template_facts
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target

# bytes along K that one matrix instruction takes at least from a row of A (fp16: 16 elements)
MATRIX_K_BYTES = 32
# bytes of a number that was unpacked for matrix instructions of 16 bits
UNPACKED_BYTES = 2
# registers of a thread for addresses, masks and loop counters; 22 to 30 were seen on gfx942
BOOKKEEPING_REGISTERS = 24
# units of a compute unit that each issue the instructions of one warp at a time
SIMDS = 4
# bytes that a thread loads at most at once
LOAD_BYTES = 16
# bytes along K of a row that a warp reads at most before each of its turns with the matrix units
TURN_BYTES = 64
# Most registers of a thread for the sum of a block of K: a warp group whose rows need more multiplies them in halves.
MOST_BLOCK_SUM = 64
# iterations whose operands the compiler loads together if an iteration needs one load (seen on sm90)
UNROLLED_ITERATIONS = 4


def matrix_sides(config: Config) -> tuple[int, int]:
    """Return rows and columns of the tile as matrix instructions see them; swap_ab computes the transpose."""
    tile = config.block_m, config.block_n
    return (tile[1], tile[0]) if config.option("swap_ab") else tile


def without_matrix_units(config: Config) -> bool:
    """Say whether products are computed without matrix instructions, each thread's in its own registers."""
    return not template_facts.search_facts(config.template).matrix


def has_single_row(config: Config) -> bool:
    """Say whether a program has one row of A, so that loads go straight to the registers that multiply."""
    return without_matrix_units(config) and config.block_m == 1


def pipeline_stages(config: Config, problem: Problem, target: Target) -> int:
    """Return the blocks of K whose loads are in flight at a time, plus the one being multiplied."""
    if not has_single_row(config):
        return config.option("prefetch", 1) if without_matrix_units(config) else config.num_stages
    each = config.block_n * config.block_k * problem.b.type.width / (config.num_warps * target.wave_size)
    return 1 + (UNROLLED_ITERATIONS if each <= LOAD_BYTES else 1)


def async_matrix(config: Config, target: Target) -> bool:
    """Say whether matrix instructions read LDS themselves: a warp group of 4 with 64 rows, or tensor memory."""
    grouped = matrix_sides(config)[0] >= 64 and config.num_warps % 4 == 0 and config.option("slices", 1) == 1
    return target.has("tensor_memory") or (grouped and target.has("wgmma"))


def takes_turns(config: Config, problem: Problem, target: Target) -> bool:
    """Say whether Triton makes two warps of a SIMD take turns, one with memory and one with matrix instructions.

    Its conditions are those of its schedules for gfx942 and, with loads straight to LDS, for gfx950 (Triton 3.9).
    """
    if not target.has("ping_pong") or without_matrix_units(config) or not config.is_generated:
        return False
    (m, n), width = matrix_sides(config), problem.a.type.width
    if problem.a.dtype != problem.b.dtype or problem.scale_depth:
        return problem.microscaled and m == n == 256 and (config.num_warps, config.num_stages) == (8, 2)
    if not target.has("register_staging"):
        return config.num_warps == 8 and config.num_stages > 2 and min(m, n) > 64 and width in (1, 2)
    size = m * n * config.block_k * width / 2**20  # 2: 128 x 128 x 64 numbers of 16 bits
    if config.num_stages != 2 or config.num_warps == 4:
        return config.num_stages == 2 and size <= 2
    # These would spill: instructions of 16 rows whose operands are read as eight numbers.
    spills = config.option("matrix_instr_nonkdim") == 16 and 8 // width * config.option("kpack") == 8
    return config.num_warps == 8 and (size == 4 or (size >= 8 and not spills))


def lds_bytes(config: Config, problem: Problem, target: Target) -> int:
    """Return the bytes of LDS that hold tiles of A and B while the K loop runs; the epilogue may need more."""
    if "warp_roles" in template_facts.search_facts(config.template).rules:
        return config.num_stages * int(slot_lines(config, problem) * config.block_k * problem.a.type.width)
    a = int(config.block_m * config.block_k * problem.a.type.width)
    b = int(config.block_n * config.block_k * problem.b.type.width)
    if without_matrix_units(config):
        return 0 if has_single_row(config) else (pipeline_stages(config, problem, target) - 1) * (a + b)
    if config.num_stages <= 1:
        return max(a, b)
    if problem.microscaled and not target.has("scaled_matrix") and target.has("wgmma") and async_matrix(config, target):
        # Numbers leave their buffers to be multiplied by their scales; the second operand is read from LDS as bf16.
        return (config.num_stages - 1) * (a + b) + matrix_sides(config)[1] * config.block_k * UNPACKED_BYTES
    # Only operands that matrix instructions read from LDS keep the buffer of the stage in use.
    free = target.free_stages if not target.has("wgmma") or async_matrix(config, target) else 1
    return (config.num_stages - free) * (a + b)


def slot_lines(config: Config, problem: Problem) -> int:
    """Return the rows and columns of a tile, as matrix instructions see them, that a slot of the ring has room for."""
    rows = 0 if template_facts.kernel_template(config.template).fragments else matrix_sides(config)[0]  # from registers
    return rows + template_facts.columns_of_slot(config, problem)


def stored_bytes(config: Config, problem: Problem) -> int:
    """Return the bytes of LDS that hold the part of C which the copy engine still stores when the next tile begins.

    Kernels whose warps have roles have a rule of their own. Where matrix units apply scales the bytes are not known.
    """
    facts = template_facts.search_facts(config.template)
    if (
        "c" not in template_facts.kernel_template(config.template).descriptors
        or "warp_roles" in facts.rules
        or problem.microscaled
    ):
        return 0
    return config.block_m * config.block_n // config.option("epilogue_parts", 1) * problem.c.type.bytes


def accumulator_registers(config: Config, target: Target) -> int:
    """Return the 32-bit registers a thread needs for its share of the C tile, or of the products summed in it."""
    depth = config.block_k if without_matrix_units(config) else config.option("slices", 1)
    return ceil(config.block_m * config.block_n * depth / (config.num_warps * target.wave_size))


def block_sum_registers(config: Config, problem: Problem, target: Target) -> int:
    """Return the 32-bit registers a thread needs for the sum of one block of K; 0 if blocks add to the accumulator.

    Warp-specialised kernels keep a second accumulator if K is too long for one sum of fp8 products in the matrix units.
    A separate block sum is also needed if scales change along K and the matrix units do not apply them;
    warp-specialised kernels then multiply large tiles in two parts, side by side or, if the tile is high, one below the
    other. Of a weight of four bits they hold two widened blocks instead, of which one is multiplied.
    """
    with_roles = "warp_roles" in template_facts.search_facts(config.template).rules
    if template_facts.adds_blocks(problem, target) and with_roles:
        return accumulator_registers(config, target)
    if not problem.scale_depth or problem.microscaled or without_matrix_units(config) or not config.is_generated:
        return 0
    if with_roles and template_facts.has_four_bit_weight(problem):
        return config.block_n * config.block_k // (config.num_warps * target.wave_size)
    template, (rows, columns) = template_facts.kernel_template(config.template), matrix_sides(config)
    at_once = template_facts.columns_at_once(problem)
    rest = template.value(config, "tail", at_once) if "tail" in template.constexprs else 0
    held = ceil(rows * (columns - rest) / (config.num_warps * target.wave_size))
    in_one_part = rest or template_facts.padded_columns(config, at_once)
    stacked = with_roles and not in_one_part and not config.option("swap_ab") and held > MOST_BLOCK_SUM
    return held // 2 if stacked else held


def staging_registers(config: Config, problem: Problem, target: Target) -> int:
    """Return the 32-bit registers a thread needs for loads on their way to LDS; 0 if they bypass registers."""
    if not target.has("register_staging") or config.num_stages < 2:
        return 0
    tile = config.block_k * (config.block_m * problem.a.type.width + config.block_n * problem.b.type.width)
    return ceil(tile / (4 * config.num_warps * target.wave_size))


def register_limit(config: Config, target: Target) -> int:
    """Return the most 32-bit registers a thread may have for one program to fit on a compute unit."""
    return min(target.max_registers, target.registers_per_cu // (config.num_warps * target.wave_size))


@dataclass(frozen=True)
class WarpLayout:
    """How the warps of a program share its tile."""

    # along_m, along_n: warps that own different rows, columns; fewer than num_warps when the tile is too small
    along_m: int
    along_n: int
    # rows, columns: matrix instructions of one warp along M and N
    rows: int
    columns: int
    shape: tuple[int, int]  # M and N of one matrix instruction


def split_among_warps(config: Config, target: Target) -> WarpLayout:
    """Split as Triton does: the longer side first, M first for warp groups; surplus warps repeat work."""
    side = config.option("matrix_instr_nonkdim") or 16
    m, n = (side, side) if target.has("matrix_instr_nonkdim") else (16, 8)
    grouped = async_matrix(config, target)
    high, wide = matrix_sides(config)
    wm = wn = 1
    while wm * wn < config.num_warps // config.option("slices", 1):
        left_m, left_n = high // (m * wm), wide // (n * wn)
        if left_m > 1 and (grouped or left_m * m >= left_n * n or left_n <= 1):
            wm *= 2
        elif left_n > 1:
            wn *= 2
        else:
            break
    return WarpLayout(wm, wn, max(1, ceil(high / (m * wm))), max(1, ceil(wide / (n * wn))), (m, n))


def operand_registers(config: Config, problem: Problem, target: Target) -> int:
    """Return the 32-bit registers a thread needs for operands read back from LDS; 0 if none is needed."""
    if async_matrix(config, target):
        return 0
    if without_matrix_units(config):
        block = config.block_k * (config.block_m * problem.a.type.width + config.block_n * problem.b.type.width)
        return ceil(block / (4 * config.num_warps * target.wave_size))
    split = split_among_warps(config, target)
    rows = split.rows * split.shape[0] * problem.a.type.width + split.columns * split.shape[1] * problem.b.type.width
    # What is read of a block at a time: all of it on CDNA, or a slice where warps take turns with large tiles.
    depth = config.block_k if target.has("matrix_instr_nonkdim") else min(config.block_k, 64)
    if takes_turns(config, problem, target) and config.num_warps == 8 and target.has("register_staging"):
        depth = min(depth, ceil(TURN_BYTES / problem.a.type.width))
    return ceil(rows * depth / (4 * target.wave_size))


def factor_registers(config: Config, problem: Problem, target: Target) -> int:
    """Return the 32-bit registers of a thread for factors that matrix instructions of CDNA apply.

    Factors in rows are read one by one; of shuffled ones a word has what an instruction reads.
    """
    scaling = problem.a.scaling
    if scaling is None or not (
        problem.microscaled and target.has("scaled_matrix") and target.has("matrix_instr_nonkdim")
    ):
        return 0
    split = split_among_warps(config, target)
    rows = split.rows * split.shape[0] + split.columns * split.shape[1]
    held = 1 if scaling.layout == "rows" else 4
    return ceil(rows * config.block_k / (scaling.depth * target.wave_size * held))


def wanted_registers(config: Config, problem: Problem, target: Target) -> int:
    """Return the 32-bit registers a thread needs, before the compiler is held to `register_limit`."""
    held = accumulator_registers(config, target) + staging_registers(config, problem, target)
    held += block_sum_registers(config, problem, target) + factor_registers(config, problem, target)
    return BOOKKEEPING_REGISTERS + held + operand_registers(config, problem, target)


def programs_per_cu(
    config: Config, problem: Problem, target: Target, built: Artifact | None = None, wanted: int | None = None
) -> int:
    """Return the programs that fit on one compute unit, at least 1; `wanted` is `wanted_registers`, if known."""
    threads = config.num_warps * target.wave_size
    lds, used = lds_bytes(config, problem, target), wanted or wanted_registers(config, problem, target)
    if built is not None and built.status == "ok":
        lds, used = built.shared or lds, built.registers or used
        threads = built.threads or threads
    used = min(used, register_limit(config, target))
    fits = (
        target.lds_per_cu // max(1, lds),
        target.registers_per_cu // (max(1, used) * threads),
        target.max_threads_per_cu // threads,
    )
    return max(1, min(fits))

"""Rules about what programs hold while their loops run: LDS, registers, blocks under way, a compute unit's room."""

from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model import occupancy
from tritongemm.search.cost_model.waves import count_tiles

# A thread that loads as many elements of one block was never within 3 % of the best on an H200.
UNROLLED_ELEMENTS_LIMIT = 512
# A pipeline of more stages must fill three quarters of the LDS.
USUAL_STAGES = 6


def lds(config: Config, problem: Problem, target: Target) -> str | None:
    """The tiles of A and B under way, and what is stored of C, must fit into the LDS that a program may have."""
    used = occupancy.lds_bytes(config, problem, target) + occupancy.stored_bytes(config, problem)
    return f"LDS {used} > {target.lds_bytes}" if used > target.lds_bytes else None


def accumulator(config: Config, problem: Problem, target: Target) -> str | None:
    """The tile of C and the loads under way live in registers through the entire K loop."""
    limit = occupancy.register_limit(config, target)
    waiting = occupancy.staging_registers(config, problem, target)
    held = occupancy.accumulator_registers(config, target) + occupancy.block_sum_registers(config, problem, target)
    return f"{held} accumulator + {waiting} staging registers >= {limit}" if held + waiting >= limit else None


def unrolled(config: Config, problem: Problem, target: Target) -> str | None:
    """A thread's loads of one block are written out one by one: too many spill, and the compiler takes a second."""
    each = config.block_k * max(config.block_m, config.block_n) // (config.num_warps * target.wave_size)
    return (
        f"{each} elements of a block for each thread >= {UNROLLED_ELEMENTS_LIMIT}"
        if each >= UNROLLED_ELEMENTS_LIMIT
        else None
    )


def stages(config: Config, problem: Problem, target: Target) -> str | None:
    """A pipeline deeper than the K loop is long only takes LDS."""
    loop = cdiv(problem.k, config.block_k * config.split_k)
    deep = config.num_stages > 2 and config.num_stages - 1 > loop
    return f"{config.num_stages} stages for {loop} K blocks" if deep else None


def pipeline_depth(config: Config, problem: Problem, target: Target) -> str | None:
    """Many stages are for the most that can be under way; anything less is as well had with fewer and larger blocks.

    Blocks from memory that all compute units draw on arrive late: on an H200 256 x 4096 x 4096 in tiles of 64 x 128 x
    64 took 23.6 us with 4 stages, 17.2 with 6 and 15.0 with 9.
    """
    used = occupancy.lds_bytes(config, problem, target)
    few = config.num_stages > USUAL_STAGES and 4 * used < 3 * target.lds_bytes
    return f"{config.num_stages} stages in {used} bytes of LDS, 3/4 of {target.lds_bytes} wanted" if few else None


def programs_of_a_unit(config: Config, problem: Problem, target: Target) -> str | None:
    """More programs than a compute unit has room or tiles for are the same as fewer."""
    wanted, units = config.option("per_unit", 1), target.compute_units
    if wanted == 1:
        return None
    if (used := occupancy.lds_bytes(config, problem, target) * wanted) > target.lds_per_cu:
        return f"{wanted} programs of a CU take {used} bytes of LDS, it has {target.lds_per_cu}"
    tiles = count_tiles(config, problem)
    return f"{tiles} tiles for {wanted} programs on each of {units} CUs" if tiles <= (wanted - 1) * units else None

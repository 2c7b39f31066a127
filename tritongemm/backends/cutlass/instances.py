"""The parameters of a CUTLASS instance, and the rules for valid configs: warp groups, shared memory, registers."""

from tritongemm.core.config import Config
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.pruning.rules import Rule

GROUP_ROWS = 64  # rows of C that a warp group computes with one matrix instruction
_MOST_ACCUMULATORS = 192  # of a thread: more leave too few registers for the rest
_BARRIERS = 1024


def tile(config: Config) -> tuple[int, int, int]:
    """Return the kernel's own tile; with A and B exchanged, its M is the problem's N."""
    m, n, k = config.tile
    return (n, m, k) if config.option("swap_ab") else (m, n, k)


def cluster(config: Config) -> tuple[int, int]:
    """Return the programs of one cluster along the kernel's own M and N."""
    m, n = config.option("cluster_m", 1), config.option("cluster_n", 1)
    return (n, m) if config.option("swap_ab") else (m, n)


def stage_bytes(config: Config, problem: Problem) -> int:
    """Return the shared memory of one pipeline stage, in bytes."""
    return config.block_k * (config.block_m * problem.a.type.bytes + config.block_n * problem.b.type.bytes)


def epilogue_bytes(config: Config, problem: Problem) -> int:
    """Return the epilogue's shared memory in bytes: four parts of a tile, 32 columns of 64 rows per group."""
    m, n, _ = tile(config)
    return 4 * min(m, groups(config) * GROUP_ROWS) * min(n, 32) * problem.c.type.bytes + _BARRIERS


def groups(config: Config) -> int:
    """Return the warp groups that share a tile."""
    return {"single": 1, "pingpong": 1}.get(config.template, 2)


def _groups(config: Config, problem: Problem, target: Target) -> str | None:
    rows, shared = tile(config)[0], groups(config) * GROUP_ROWS
    if rows % shared:
        return f"{rows} rows for warp groups that take {shared}"
    warps = 4 * (2 if config.template == "single" else 3)
    return f"{config.num_warps} warps, {config.template} has {warps}" if config.num_warps != warps else None


def _accumulators(config: Config, problem: Problem, target: Target) -> str | None:
    held = config.block_m * config.block_n // (groups(config) * 128)
    return f"{held} accumulators > {_MOST_ACCUMULATORS}" if held > _MOST_ACCUMULATORS else None


def _alone(config: Config, problem: Problem, target: Target) -> str | None:
    """Refuse pingpong with one tile for each program, as its second group would idle."""
    tiles = cdiv(problem.m, config.block_m) * cdiv(problem.n, config.block_n)
    if config.template != "pingpong" or tiles > target.compute_units or tile(config)[0] % (2 * GROUP_ROWS):
        return None
    return f"{tiles} tiles for two turns on each of {target.compute_units} SMs"


def _stages(config: Config, problem: Problem, target: Target) -> str | None:
    """Keep the deepest pipeline that fits, up to what the space lists."""
    room = target.lds_bytes - epilogue_bytes(config, problem)
    deepest = min(room // stage_bytes(config, problem), 8)
    if config.num_stages == deepest:
        return None
    return f"{config.num_stages} stages, {deepest} fit"


def _cluster(config: Config, problem: Problem, target: Target) -> str | None:
    """Limit a cluster to two programs, each of which should have a tile."""
    wide = cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_n)
    want = config.option("cluster_m", 1), config.option("cluster_n", 1)
    if want[0] * want[1] > 2:
        return f"a cluster of {want[0] * want[1]}"
    return f"cluster {want} of {wide} tiles" if want[0] > wide[0] or want[1] > wide[1] else None


def _swap(config: Config, problem: Problem, target: Target) -> str | None:
    """Keep the exchange of A and B for a small M; elsewhere it is the same kernel of another shape."""
    if config.option("swap_ab") and config.block_m > 64:
        return f"swap_ab with a block of {config.block_m} rows"
    return None


def _swizzle(config: Config, problem: Problem, target: Target) -> str | None:
    few = min(cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_n))
    return f"swizzle {config.group_m} of {few} rows of tiles" if config.group_m > few else None


def _narrow(config: Config, problem: Problem, target: Target) -> str | None:
    """Refuse fewer than 64 columns, which read more than they multiply, unless C has no more or SMs would idle."""
    swapped = config.option("swap_ab")
    columns, have = tile(config)[1], problem.m if swapped else problem.n
    if columns >= min(64, have):
        return None
    other = cdiv(problem.n, config.block_n) if swapped else cdiv(problem.m, config.block_m)
    wide = cdiv(have, 64) * other
    return f"{columns} columns, where 64 make {wide} tiles" if wide >= target.compute_units else None


def preference(config: Config) -> tuple[int, ...]:
    """Return the sort key of instances of one tile: programs of a cluster share their loads, which favours large tiles.

    With few small tiles, clusters leave SMs unused, because a cluster needs adjacent SMs.
    """
    programs = config.option("cluster_m") * config.option("cluster_n")
    large = config.block_m * config.block_n >= 128 * 128
    kind = ("pingpong", "cooperative", "single", "stream_k").index(config.template)
    return -programs if large else programs, kind, -config.option("cluster_m")


RULES = (
    Rule("warp_groups", _groups),
    Rule("swap_ab", _swap),
    Rule("accumulators", _accumulators),
    Rule("alone", _alone),
    Rule("stages", _stages),
    Rule("narrow", _narrow),
    Rule("cluster", _cluster),
    Rule("swizzle", _swizzle),
)

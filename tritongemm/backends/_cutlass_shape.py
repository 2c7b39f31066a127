"""What a CUTLASS instance is made of, and the rules that keep a config one: warp groups, shared memory, registers."""

from __future__ import annotations

from tritongemm.backends._instances import cdiv
from tritongemm.config import Config
from tritongemm.problem import Problem
from tritongemm.rules import Rule
from tritongemm.target import Target

GROUP_ROWS = 64  # of C a warp group computes with one matrix instruction
_MOST_ACCUMULATORS = 128  # of a thread: more leave too few registers for the rest
_BARRIERS = 1024


def tile(config: Config) -> tuple[int, int, int]:
    """The kernel's own tile; with A and B exchanged, its M is the problem's N."""
    m, n, k = config.tile
    return (n, m, k) if config.option("swap_ab") else (m, n, k)


def cluster(config: Config) -> tuple[int, int]:
    """Programs of one cluster along the kernel's own M and N."""
    m, n = config.option("cluster_m", 1), config.option("cluster_n", 1)
    return (n, m) if config.option("swap_ab") else (m, n)


def stage_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of one stage of the pipeline."""
    return config.block_k * (config.block_m * problem.a.bytes + config.block_n * problem.b.bytes)


def epilogue_bytes(config: Config, problem: Problem) -> int:
    """Shared memory C leaves through: four parts of a tile, 32 columns of each warp group's 64 rows."""
    groups = 1 if config.template == "pingpong" else 2
    m, n, _ = tile(config)
    return 4 * min(m, groups * GROUP_ROWS) * min(n, 32) * problem.c.bytes + _BARRIERS


def _groups(config: Config, problem: Problem, target: Target) -> str | None:
    rows = tile(config)[0]
    least = GROUP_ROWS if config.template == "pingpong" else 2 * GROUP_ROWS
    return f"{rows} rows < {least} of the warp groups that share a tile" if rows < least else None


def _accumulators(config: Config, problem: Problem, target: Target) -> str | None:
    groups = 1 if config.template == "pingpong" else 2
    held = config.block_m * config.block_n // (groups * 128)
    return f"{held} accumulators > {_MOST_ACCUMULATORS}" if held > _MOST_ACCUMULATORS else None


def _stages(config: Config, problem: Problem, target: Target) -> str | None:
    """The deepest pipeline that fits is taken, up to what the space lists."""
    room = target.lds_bytes - epilogue_bytes(config, problem)
    deepest = min(room // stage_bytes(config, problem), 8)
    if config.num_stages == deepest:
        return None
    return f"{config.num_stages} stages, {deepest} fit"


def _cluster(config: Config, problem: Problem, target: Target) -> str | None:
    """Of a cluster, every program should have a tile."""
    wide = cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_n)
    want = config.option("cluster_m", 1), config.option("cluster_n", 1)
    if want[0] * want[1] > 2:
        return f"a cluster of {want[0] * want[1]}"
    return f"cluster {want} of {wide} tiles" if want[0] > wide[0] or want[1] > wide[1] else None


def _swap(config: Config, problem: Problem, target: Target) -> str | None:
    """Exchanging pays where M is small; elsewhere it is the same kernel of another shape."""
    if config.option("swap_ab") and config.block_m > 64:
        return f"swap_ab with a block of {config.block_m} rows"
    return None


def _swizzle(config: Config, problem: Problem, target: Target) -> str | None:
    few = min(cdiv(problem.m, config.block_m), cdiv(problem.n, config.block_n))
    return f"swizzle {config.group_m} of {few} rows of tiles" if config.group_m > few else None


def _narrow(config: Config, problem: Problem, target: Target) -> str | None:
    """A kernel tile of fewer than 64 columns reads more than it multiplies, unless C has no more."""
    columns, have = tile(config)[1], problem.m if config.option("swap_ab") else problem.n
    return f"{columns} columns of {have}" if columns < min(64, have) else None


def preference(config: Config) -> tuple[int, ...]:
    """Orders instances of one tile: clusters share their reads, so pairs come before single programs."""
    return (
        -config.option("cluster_m") - config.option("cluster_n"),
        ("pingpong", "cooperative", "stream_k").index(config.template),
        -config.option("cluster_m"),
    )


RULES = (
    Rule("warp_groups", _groups),
    Rule("swap_ab", _swap),
    Rule("accumulators", _accumulators),
    Rule("stages", _stages),
    Rule("narrow", _narrow),
    Rule("cluster", _cluster),
    Rule("swizzle", _swizzle),
)

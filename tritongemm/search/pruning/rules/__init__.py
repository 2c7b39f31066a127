"""The rules of pruning: each looks at one config and returns None, or the reason to drop it with its numbers.

Kernels mask what does not divide, so no rule asks M, N or K to be a multiple of a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.pruning.rules import persistent, programs, resources, tiles

Check = Callable[[Config, Problem, Target], "str | None"]


@dataclass(frozen=True)
class Rule:
    """One reason to drop a config."""

    name: str  # key of the counts
    check: Check  # gives the reason, or None to keep
    # It applies to the templates with this group among their facts (`search.rules`); "" for all templates.
    group: str = ""
    # The checks that `check` consists of for a template. A space is pruned by one after the other: those that read
    # little of a config are checked for few.
    parts: Callable[[str], Sequence[Check]] | None = None


# Cheap and strong ones first.
RULES = (
    Rule("long_blocks", persistent.long_blocks, "warp_roles"),
    Rule("sides", persistent.sides, "warp_roles"),
    Rule("groups", persistent.groups, "warp_roles"),
    Rule("two_parts", persistent.two_parts, "warp_roles"),
    Rule("group_m", tiles.group_m),
    Rule("split_k", programs.split_k),
    Rule("poll", programs.polled_reduction),
    Rule("overlap", programs.overlap),
    Rule("fits_m", tiles.fits_m),
    Rule("fits_n", tiles.fits_n),
    Rule("fits_k", tiles.fits_k),
    Rule("dot_k", tiles.dot_k, "matrix"),
    Rule("scale_depth", tiles.scale_depth),
    Rule("runs", tiles.runs),
    Rule("pieces", tiles.pieces),
    Rule("batch", tiles.batch),
    Rule("offsets", tiles.offsets),
    Rule("per_unit", resources.programs_of_a_unit, "grouped"),
    Rule("widened_tiles", tiles.widened_tiles, "grouped"),
    Rule("short_rows", tiles.short_rows, "matrix"),
    Rule("slices", tiles.slices, "fragments"),
    Rule("small_tile", tiles.small_tile, "matrix"),
    Rule("warp_group", tiles.warp_group, "matrix"),
    Rule("needs", persistent.needs, "needs", persistent.each_need),
    Rule("factors", persistent.factors, "warp_roles"),
    Rule("swapped", persistent.swapped, "swapped"),
    Rule("share", persistent.share, "warp_roles"),
    Rule("pair", persistent.pair, "warp_roles"),
    Rule("adjacent", persistent.adjacent, "warp_roles"),
    Rule("alternate", persistent.alternate, "warp_roles"),
    Rule("ring", persistent.ring, "warp_roles"),
    Rule("stream_k", persistent.stream_k, "stream_k"),
    Rule("lds", resources.lds, "matrix"),
    Rule("unrolled", resources.unrolled, "pointers"),
    Rule("accumulator", resources.accumulator, "matrix"),
    Rule("nonkdim_size", tiles.nonkdim_size, "matrix"),
    Rule("few_instructions", tiles.few_instructions, "matrix"),
    Rule("kpack", tiles.kpack, "matrix"),
    Rule("stages", resources.stages),
    Rule("deep", resources.pipeline_depth, "deep_pipeline"),
    Rule("vector_rows", programs.vector_rows, "vector"),
    Rule("straight", programs.gemv_prefetch, "vector"),
    Rule("vector_registers", programs.vector_registers, "vector"),
)

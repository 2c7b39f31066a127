"""Rules about what a program does before the last kernel has ended."""

from __future__ import annotations

from math import ceil

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import without_matrix_units
from tritongemm.search.cost_model.waves import count_tiles
from tritongemm.search.pruning.rules.persistent import RING_SLOTS_LIMIT

# In problems of more rows (or columns) the matrix units matter as much as memory, and an early start gains nothing.
EARLY_START_ROWS = 64
# In problems of more rows (or columns) what comes before the first product hardly matters.
FETCH_AHEAD_ROWS = 256
# From so many blocks of K few rows gained 1 % on an H200 by weights fetched ahead of a ring of the usual depth.
FETCH_AHEAD_BLOCKS = 96


def overlap(config: Config, problem: Problem, target: Target) -> str | None:
    """What a program does before the last kernel has ended pays where there is little to multiply.

    What is left to hide is short: the end of a sum, the programs' own start. On an H200 other combinations than these
    gained nothing, or lost.
    """
    if config.option("ahead", -1) < 0:  # the template does not have it; to list all options would be to read them
        return None
    if "warp_roles" in search_facts(config.template).rules:
        # The warp that fetches starts early by itself; its first weights come ahead where the ring is deep besides.
        slots, deep = config.num_stages, config.num_stages > RING_SLOTS_LIMIT
        many_blocks = problem.k >= FETCH_AHEAD_BLOCKS * config.block_k and min(problem.m, problem.n) <= EARLY_START_ROWS
        either = slots == RING_SLOTS_LIMIT and many_blocks
        goes = either or (config.option("ahead") > 0) == deep
        return None if goes else f"ahead goes with num_stages above {RING_SLOTS_LIMIT}, here {slots}"
    ahead, early, split = config.option("ahead"), config.option("early"), config.split_k > 1
    rows = min(problem.m, problem.n)
    if rows > FETCH_AHEAD_ROWS or not target.overlap:
        return f"{rows} rows > {FETCH_AHEAD_ROWS} for fetching ahead" if ahead or early else None
    if rows > EARLY_START_ROWS and early:
        return f"{rows} rows > {EARLY_START_ROWS} for an early start"
    if without_matrix_units(config):
        return "blocks ahead and an early start go together" if (ahead > 0) != (early > 0) else None
    usual = int(search_facts(config.template).slow_start or split)  # slow to start, or with a sum at the end
    if not early:
        return f"{ahead} blocks ahead rather than {usual}" if ahead != usual else None
    # Neighbours that read the same weights share requests to L2 while they keep in step, and these would start apart.
    extent, block = min((problem.m, config.block_m), (problem.n, config.block_n))
    if (readers := ceil(extent / block)) > 1:
        return f"an early start of {readers} tiles that read the same blocks"
    # Programs of the next kernel go where there is most room: on compute units that are idle now, two on each.
    programs, units = count_tiles(config, problem) * config.split_k, target.compute_units
    level = 9 * units < 10 * programs <= 10 * units
    return None if ahead and level else f"an early start, {ahead} blocks ahead, of {programs} programs on {units} CUs"

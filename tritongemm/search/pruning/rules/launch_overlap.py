"""Rules about what a program does before the last kernel has ended."""

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
# Blocks that the warp that fetches brings into L2 ahead of a ring of the usual depth, by the rows (or columns) of
# problems. On an H100 128 x 7168 x 2048 in tiles of 128 x 64 took 7.8 us with four, 8.5 with none and 8.4 with eight;
# 256 x 7168 x 2048 in pairs of 128 x 128 9.6 with two, 9.8 with four and 10.3 with none.
FETCHED_AHEAD = ((128, 4), (FETCH_AHEAD_ROWS, 2))


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
    usual = 0 if 4 * programs <= 3 * units else 2 if programs <= units else 1
    if usual and ahead == usual:
        return None
    return f"an early start, {ahead} blocks ahead, of {programs} programs on {units} CUs"

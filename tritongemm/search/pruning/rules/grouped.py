"""Rules about grouped products, whose tiles are shared out to the programs of a compute unit."""

from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import lds_bytes
from tritongemm.search.cost_model.waves import count_tiles


def programs_of_a_unit(config: Config, problem: Problem, target: Target) -> str | None:
    """More programs than a compute unit has room or tiles for are the same as fewer."""
    wanted, units = config.option("per_unit", 1), target.compute_units
    if wanted == 1:
        return None
    if (used := lds_bytes(config, problem, target) * wanted) > target.lds_per_cu:
        return f"{wanted} programs of a CU take {used} bytes of LDS, it has {target.lds_per_cu}"
    tiles = count_tiles(config, problem)
    return f"{tiles} tiles for {wanted} programs on each of {units} CUs" if tiles <= (wanted - 1) * units else None

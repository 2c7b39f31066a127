"""The distribution of C's tiles over compute units: the waves of a launch, and the cost of tiles split along K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Floats

Number = TypeVar("Number", int, NDArray[np.float64])
# bytes of a partial sum: split-K and stream-K add up in fp32
PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Wave(Generic[Number]):
    """Identical waves of programs, of one launch or as columns of many."""

    # Number of such waves, one after the other; a fraction where programs do not wait for their wave.
    count: Number | float
    resident: Number  # programs that share a compute unit
    programs: Number  # programs that run on the device at a time
    loop: Number  # K iterations of each
    shared: Number  # programs that work on one tile

    def where(self, condition: NDArray[np.bool_], other: Wave[Floats]) -> Wave[Floats]:
        """Return the columns of this one where a condition holds, elsewhere those of another one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Wave(*(np.where(condition, mine, theirs) for mine, theirs in pairs))

    def with_rows(self, places: Sequence[int], others: Wave[Floats]) -> Wave[Floats]:
        """Return the columns of this one with those of another one at some places."""
        changed = {name: np.array(column, np.float64) for name, column in vars(self).items()}
        for name, column in changed.items():
            column[places] = vars(others)[name]
        return Wave(**changed)


def count_tiles(config: Config, problem: Problem) -> int:
    """Return the number of tiles of C over the entire batch."""
    return ceil(problem.m / config.block_m) * ceil(problem.n / config.block_n) * problem.batch


def persistent_programs(config: Config, target: Target) -> int:
    """Return the programs of a persistent grid, which does not grow with the problem; 0 for one program per tile."""
    given = config.option("num_sms")
    given = given or config.option("per_unit") * target.compute_units
    return given or (target.compute_units if search_facts(config.template).one_a_unit(config) else 0)


def tile_waves(
    tiles: Floats, loop: Floats, split: Floats, fits: Floats, units: int, refilled: Floats
) -> tuple[Wave[Floats], Wave[Floats]]:
    """Return the full waves of launches with a program for each tile, and the last ones; those of no program count 0.

    Args:
        tiles: of C.
        loop: K iterations of a tile.
        split: programs that share a tile.
        fits: programs that a compute unit holds.
        units: compute units.
        refilled: 1 where programs are small, and of many one begins as soon as another ends; else 0.
    """
    programs, loop, at_once = tiles * split, np.ceil(loop / split), units * fits
    complete, rest = np.divmod(programs, at_once)
    flows, alone = (refilled > 0) & (programs > at_once), complete == 0
    full = Wave(np.where(flows, programs / at_once, complete), fits, at_once, loop, split)
    part = Wave(np.ones(len(rest)), np.ceil(rest / units), rest, loop, split)
    last = part.where(rest > 0, full)
    return part.where(alone, full), replace(last, count=((rest > 0) & ~alone & ~flows).astype(np.float64))


def persistent_waves(config: Config, problem: Problem, target: Target, fits: int) -> tuple[Wave[int], ...]:
    """Return the waves of a persistent grid on compute units that hold `fits` programs each; none for other grids."""
    units, tiles, loop = target.compute_units, count_tiles(config, problem), ceil(problem.k / config.block_k)
    programs = persistent_programs(config, target)
    if not programs:
        return ()
    resident = max(1, min(fits, ceil(programs / units)))
    complete, rest = divmod(tiles, programs)
    if config.option("share_more") and complete and rest:
        complete, rest = complete - 1, rest + programs
    # Programs that do not fit at once wait until others have done all that is theirs.
    turns, under_way = ceil(programs / (units * resident)), min(programs, units * resident)
    full = Wave(complete * turns, resident, under_way, loop, 1)
    if not rest:
        return (full,)
    if not search_facts(config.template).cuts(config):
        turns = ceil(rest / (units * resident))
        last = Wave(turns, min(resident, ceil(rest / units)), min(rest, under_way), loop, 1)
    else:
        # Stream-K: the K iterations of the remaining tiles are dealt out evenly, whatever tiles a share cuts through.
        each = ceil(rest * loop / programs)
        crossed = 1 if loop % each == 0 else ceil((each - 1) / loop) + 1
        shared = min(loop, ceil(programs / rest))  # programs whose iterations meet in one tile
        last = Wave(turns * crossed, resident, min(under_way, rest * loop), ceil(each / crossed), shared)
    return (full,) * (complete > 0) + (last,)


def combine_seconds(
    tiles: Floats, split: Floats, tile_seconds: Floats, polled: Floats, last: Wave[Floats], target: Target
) -> Floats:
    """Return the seconds to add up the tiles that several programs of the `last` wave share; 0 where none is shared.

    Each partial sum except the owner's goes out to memory and becomes visible to the entire device, which costs as much
    as the end of a kernel, unless the partial sums themselves show that they have arrived; then one program reads them,
    waiting for each. A tile's partial sums are drawn in `tile_seconds`; `polled` is 1 where they show that they have
    arrived, else 0.
    """
    each = target.memory_ns * 1e-9 + tile_seconds
    owned = np.where(split > 1, np.ceil(tiles / target.compute_units), 1.0)
    start = np.where(polled > 0, 0.0, target.launch_us * 1e-6)
    return np.where(last.shared <= 1, 0.0, start + owned * (each + last.shared * each))

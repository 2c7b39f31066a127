"""The distribution of C's tiles over compute units: the waves of a launch, and the cost of tiles split along K."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tritongemm.codegen.template_facts import search_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.search.cost_model.occupancy import without_matrix_units

Number = TypeVar("Number", int, NDArray[np.float64])
# A partial sum has so many bytes: split-K and stream-K add up in fp32.
PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Wave(Generic[Number]):
    """Identical waves of programs, of one launch or as columns of many.

    Attributes:
        count: number of such waves, one after the other; a fraction where programs do not wait for their wave.
        resident: programs that share a compute unit.
        programs: programs that run on the device at a time.
        loop: K iterations of each.
        shared: programs that work on one tile.
    """

    count: Number | float
    resident: Number
    programs: Number
    loop: Number
    shared: Number


def count_tiles(config: Config, problem: Problem) -> int:
    """Return the number of tiles of C over the whole batch."""
    return ceil(problem.m / config.block_m) * ceil(problem.n / config.block_n) * problem.batch


def persistent_programs(config: Config, target: Target) -> int:
    """Return the programs of a persistent grid, which does not grow with the problem; 0 for one program per tile."""
    given = config.option("num_sms")
    given = given or config.option("per_unit") * target.compute_units
    return given or (target.compute_units if search_facts(config.template).one_a_unit(config) else 0)


def waves(config: Config, problem: Problem, target: Target, fits: int) -> tuple[Wave[int], ...]:
    """Return the waves of one launch on compute units that hold `fits` programs each."""
    units, tiles, loop = target.compute_units, count_tiles(config, problem), ceil(problem.k / config.block_k)
    programs = persistent_programs(config, target)
    if not programs:
        tiles, loop, shared = tiles * config.split_k, ceil(loop / config.split_k), config.split_k
        if (
            without_matrix_units(config) and tiles > units * fits
        ):  # many small programs, of which one begins as soon as another ends
            return (Wave(tiles / (units * fits), fits, units * fits, loop, shared),)
        whole, rest = divmod(tiles, units * fits)
        full = Wave(whole, fits, units * fits, loop, shared)
        last = Wave(1, ceil(rest / units), rest, loop, shared)
        return (full,) * (whole > 0) + (last,) * (rest > 0)
    resident = max(1, min(fits, ceil(programs / units)))
    whole, rest = divmod(tiles, programs)
    if config.option("share_more") and whole and rest:
        whole, rest = whole - 1, rest + programs
    # Programs that do not fit at once wait until others have done all that is theirs.
    turns, under_way = ceil(programs / (units * resident)), min(programs, units * resident)
    full = Wave(whole * turns, resident, under_way, loop, 1)
    if not rest:
        return (full,)
    if not search_facts(config.template).cuts(config):
        turns = ceil(rest / (units * resident))
        last = Wave(turns, min(resident, ceil(rest / units)), min(rest, under_way), loop, 1)
    else:
        # Stream-K: the K iterations of the remaining tiles are dealt out evenly, whatever tiles a share cuts through.
        each = ceil(rest * loop / programs)
        crossed = 1 if loop % each == 0 else ceil((each - 1) / loop) + 1
        shared = _programs_a_tile(rest, loop, programs)
        last = Wave(turns * crossed, resident, min(under_way, rest * loop), ceil(each / crossed), shared)
    return (full,) * (whole > 0) + (last,)


def _programs_a_tile(tiles: int, loop: int, programs: int) -> int:
    """Programs whose iterations meet in one of `tiles` tiles."""
    return min(loop, ceil(programs / tiles))


def combine_seconds(config: Config, problem: Problem, target: Target, cu_rate: float, last: Wave[int]) -> float:
    """Return the seconds to add up the tiles that several programs of the `last` wave share; 0 if none is shared.

    Each partial sum except the owner's goes out to memory and becomes visible to the whole device, which costs as much
    as the end of a kernel, unless the partial sums themselves show that they have arrived; then one program reads them,
    waiting for each.
    """
    if last.shared <= 1:
        return 0.0
    latency, transfer = target.memory_ns * 1e-9, config.block_m * config.block_n * PARTIAL_BYTES / cu_rate
    owned = ceil(count_tiles(config, problem) / target.compute_units) if config.split_k > 1 else 1
    told = 0.0 if config.option("poll") else target.launch_us * 1e-6
    return told + owned * (latency + transfer + last.shared * (latency + transfer))

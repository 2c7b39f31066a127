"""Launches of candidates as columns of numbers, from which the model computes the times of thousands at once.

Part of `tritongemm.search.cost_model.model`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tritongemm.codegen.config_memo import ConfigMemo
from tritongemm.core.artifact import Artifact, LoopFacts
from tritongemm.core.config import AXES, Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import Floats
from tritongemm.search.cost_model import occupancy
from tritongemm.search.cost_model.correction import Demand
from tritongemm.search.cost_model.tile_cost import CU_BYTES_PER_CLOCK, IterationCost, machine_loop, spilled_bytes
from tritongemm.search.cost_model.waves import PARTIAL_BYTES, Wave, combine_seconds, persistent_waves, tile_waves

# With two buffers, loads straight to LDS are issued behind a barrier and reads of the block that has arrived. By then
# this share of an iteration has passed (a sixth to a third of its instructions, gfx950).
LATE_OF_TWO_STAGES = 0.3


@dataclass(frozen=True)
class ProgramColumns:
    """The programs of candidates as columns, an entry for each: what is the same for problems of any size."""

    axes: Floats  # values of `core.config.AXES`, [len(AXES), n]
    stages: Floats  # blocks of K whose loads are under way, and the one being multiplied
    registers: Floats  # 32-bit registers that a thread wants
    fits: Floats  # programs that a compute unit holds
    from_lds: Floats  # 1 where matrix instructions read LDS themselves, else 0
    iteration: IterationCost[Floats]  # one K iteration of a program
    spilled: Floats  # bytes of scratch that a thread writes and reads each iteration
    hidden: Floats  # number of memory latencies that pass while the last kernel still ends
    ahead: Floats  # iterations from a load to the wait for it
    late: Floats  # share of an iteration's arithmetic that is done before the loads that it waits for are issued
    clocks: Floats  # in which a warp can issue the instructions of an iteration at best; 0 where they are not known
    turns: Floats  # 1 where warps of a SIMD take turns with memory and matrix instructions, else 0
    refilled: Floats  # 1 where programs are small, and of many one begins as soon as another ends; else 0
    polled: Floats  # 1 where partial sums show that they have arrived, else 0

    @classmethod
    def gather(
        cls, memo: ConfigMemo, problem: Problem, target: Target, built: Sequence[Artifact | None]
    ) -> ProgramColumns:
        """Return the programs of a memo's configs."""

        def column(function: Callable[..., float], *more: Sequence[Any]) -> Floats:
            return np.array(memo.map(function, *more), np.float64)

        wanted = memo.map(lambda c: occupancy.wanted_registers(c, problem, target))
        return cls(
            memo.axes(*AXES),
            column(lambda c: occupancy.pipeline_stages(c, problem, target)),
            np.array(wanted, np.float64),
            column(lambda c, b, w: occupancy.programs_per_cu(c, problem, target, b, w), built, wanted),
            column(lambda c: occupancy.async_matrix(c, target)),
            IterationCost(*_columns(memo.map(lambda c: IterationCost.estimate(c, problem, target)))),
            column(lambda c, b, w: spilled_bytes(c, problem, target, b, w), built, wanted),
            column(lambda c: _hidden(c, problem, target)),
            column(lambda c, b: _ahead(c, b, problem, target), built),
            column(lambda c, b: _late(c, b, problem, target), built),
            column(lambda c, b: _clocks(b, target), built),
            column(lambda c: occupancy.takes_turns(c, problem, target)),
            column(occupancy.without_matrix_units),
            column(lambda c: c.option("poll")),
        )

    def repeated(self, count: int) -> ProgramColumns:
        """Return all of these, repeated."""

        def again(columns: Floats) -> Floats:
            return np.tile(columns, count)

        values = {name: again(one) for name, one in vars(self).items() if name != "iteration"}
        return ProgramColumns(iteration=IterationCost(*map(again, vars(self.iteration).values())), **values)

    def axis(self, name: str) -> Floats:
        """Return the values of one of `core.config.AXES`, [n]."""
        return np.asarray(self.axes[AXES.index(name)])

    @property
    def warps(self) -> Floats:
        """The warps of a program."""
        return self.axis("num_warps")


@dataclass(frozen=True)
class LaunchColumns:
    """Launches of programs as columns, an entry for each."""

    programs: ProgramColumns  # that are launched
    # rows, columns: tiles of one C along M and along N
    rows: Floats
    columns: Floats
    tiles: Floats  # of C over the entire batch
    loop: Floats  # K iterations of a tile
    waves: tuple[Wave[Floats], Wave[Floats]]  # first and last waves; last ones that do not differ have a count of 0
    reduce: Floats  # seconds to add up shared tiles

    @classmethod
    def gather(
        cls, configs: Sequence[Config], problem: Problem, target: Target, built: Sequence[Artifact | None]
    ) -> LaunchColumns:
        """Return the launches of configs for one problem."""
        memo = ConfigMemo(configs)
        programs = ProgramColumns.gather(memo, problem, target, built)
        fits = programs.fits.astype(int).tolist()
        found = memo.map(lambda c, f: persistent_waves(c, problem, target, f), fits)
        return cls.of_sizes(programs, np.array([[problem.m], [problem.n], [problem.k], [problem.batch]]), target, found)

    @classmethod
    def of_sizes(
        cls, programs: ProgramColumns, sizes: Floats, target: Target, persistent: Sequence[tuple[Wave[int], ...]] = ()
    ) -> LaunchColumns:
        """Return launches for problems whose M, N, K and batch are columns of `sizes`, [4, 1] for one that all compute.

        `persistent` has the waves of each program's launch, for one whose grid does not grow with the problem.
        """
        (m, n, k, batch), axis = sizes, programs.axis
        rows, columns = np.ceil(m / axis("block_m")), np.ceil(n / axis("block_n"))
        tiles, loop = rows * columns * batch, np.ceil(k / axis("block_k"))
        split = np.maximum(1, axis("split_k"))
        first, last = tile_waves(tiles, loop, split, programs.fits, target.compute_units, programs.refilled)
        places = [place for place, found in enumerate(persistent) if found]
        if places:
            found = [persistent[place] for place in places]
            one = np.array([len(waves) == 1 for waves in found])
            ends = Wave(*_columns([waves[-1] for waves in found]))
            first = first.with_rows(places, Wave(*_columns([waves[0] for waves in found])))
            last = last.with_rows(places, replace(ends, count=ends.count * ~one))
        drawn = axis("block_m") * axis("block_n") * PARTIAL_BYTES / cu_rate(target)
        return cls(
            programs, rows, columns, tiles, loop, (first, last),
            combine_seconds(tiles, split, drawn, programs.polled, last, target),
        )  # fmt: skip

    def demand(self, terms: Floats, seconds: Floats) -> Demand:
        """Return what features need, given the seconds of each of `TERMS` and of a launch."""
        p = self.programs
        return Demand(
            p.axes, terms, seconds, self.waves[0].resident, p.registers, p.from_lds, p.iteration.traffic, p.stages,
            self.tiles, self.loop,
        )  # fmt: skip


def _hidden(config: Config, problem: Problem, target: Target) -> int:
    """Return the memory latencies hidden by the last kernel's end; programs that stage rows of A pay them anyway."""
    if occupancy.without_matrix_units(config) and not occupancy.has_single_row(config):
        return 0
    return min(1, config.option("ahead")) + config.option("early")


def _measured(built: Artifact | None) -> LoopFacts | None:
    """Return the facts of a loop of matrix instructions whose waits count loads, where it was read."""
    loop = machine_loop(built)
    return loop if loop is not None and loop.matrix and loop.ahead is not None else None


def _clocks(built: Artifact | None, target: Target) -> float:
    """Return the clocks in which a warp issues an iteration's instructions; a SIMD takes 64 threads in four."""
    loop = _measured(built)
    return loop.instructions * (4 if target.wave_size == 64 else 1) if loop else 0


def _ahead(config: Config, built: Artifact | None, problem: Problem, target: Target) -> float:
    """Return the iterations from a load to the wait for it, at least 1: what is less is `_late`."""
    loop = _measured(built)
    ahead = loop.ahead if loop and loop.ahead is not None else occupancy.pipeline_stages(config, problem, target) - 1
    return max(1, ahead)


def _late(config: Config, built: Artifact | None, problem: Problem, target: Target) -> float:
    """Return the share of an iteration that passes between the wait for one block and the loads of the next.

    Before it is compiled: all of it where Triton 3.9 loads the next block of B after the matrix instructions, as it
    does if loads pass through registers and scales change along K (seen on gfx942).
    """
    if loop := _measured(built):
        return max(0.0, 1 - (loop.ahead or 0))
    if target.has("direct_to_lds") and config.num_stages == 2 and not occupancy.without_matrix_units(config):
        return LATE_OF_TWO_STAGES
    scaled = problem.scale_depth > 0 and not problem.microscaled and target.has("register_staging")
    return float(scaled and config.is_generated and not occupancy.without_matrix_units(config))


def _columns(rows: Sequence[object]) -> Iterator[Floats]:
    """Yield a column for each attribute of the dataclass of `rows`."""
    known = {id(r): i for i, r in enumerate(rows)}
    distinct = np.array([list(vars(rows[i]).values()) for i in known.values()], np.float64)
    places = dict(zip(known, range(len(known)), strict=True))
    return iter(distinct[[places[id(r)] for r in rows]].T)


def cu_rate(target: Target) -> float:
    """Return the bytes per second that one compute unit can draw from its L2."""
    return CU_BYTES_PER_CLOCK * target.clock_ghz * 1e9

"""The analytical model of a compute unit and the memories behind it, which ranks kept configs.

The model prunes and seeds; its times do not replace measurements. Every figure is a fact of the `Target` or one of the
constants below, none is fitted per size; where tables of a target were recorded, `correction` adds a fitted factor.
Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import AXES, Config
from tritongemm.core.config_memo import ConfigMemo
from tritongemm.core.problem import Problem
from tritongemm.core.search_results import TERMS, Floats, Prediction, Predictions
from tritongemm.core.target import Target
from tritongemm.search.cost_model import correction, occupancy
from tritongemm.search.cost_model.correction import Demand
from tritongemm.search.cost_model.occupancy import SIMDS
from tritongemm.search.cost_model.tile_cost import CU_BYTES_PER_CLOCK, IterationCost, spilled_bytes
from tritongemm.search.cost_model.waves import PARTIAL_BYTES, Wave, combine_seconds, waves
from tritongemm.search.typical import typical

# The barrier, the waits and the branch of one K iteration take so many clocks.
SYNC_CLOCKS = 200
# A load that hits in L2, or in the last-level cache, takes this share of the latency of one that misses both: rounded
# guesses, used only for operands that stay in caches.
L2_LATENCY, LLC_LATENCY = 0.3, 0.8
# The powers of `_overlap` say how well work hides other work, from 1 (not at all) up: a queue's waiting and its
# traffic, and loads and arithmetic of a pipelined loop; then LDS and matrix units, which hide each other better with
# more warps on a SIMD to take turns: the least, the gain of each warp, and the most.
QUEUE_OVERLAP, PIPELINE_OVERLAP = 3.0, 5.0
LEAST_OVERLAP, WARP_OVERLAP, MOST_OVERLAP = 1.5, 0.5, 5.0


def rank(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    built: Mapping[Config, Artifact] | None = None,
    warm: bool = False,
) -> Predictions:
    """Return predictions for `configs`, fastest first; of equal times the larger tile first, then the taller.

    Args:
        configs: candidates, each once.
        problem: the problem they compute.
        target: the GPU's architecture.
        built: compiled configs, whose registers, spills and LDS replace the estimates.
        warm: launches follow each other on the same operands, which stay in the caches that hold them; our own timers
            never do that, some foreign tuners always do.
    """
    given, problem = tuple(configs), typical(problem)
    if not given:
        return Predictions((), np.empty(0), np.empty((0, len(TERMS))))
    batch = _Batch.gather(given, problem, target, [built.get(c) for c in given] if built else [None] * len(given))
    terms, exact = _times(batch, problem, target, warm)
    learned = None if warm else correction.fitted(target.name)
    if learned and learned.covers(problem):
        rows = correction.features(given, problem, target, batch.demand(terms, exact), learned.templates)
        exact = exact * learned.factors(given, rows)
    seconds = [round(s, 12) for s in exact.tolist()]  # to the picosecond, so that rounding errors decide nothing

    areas, heights = -batch.block_m * batch.block_n, -batch.block_m
    # The attributes of configs in their order order them as configs are ordered, and sooner.
    keys = list(zip(seconds, areas.tolist(), heights.tolist(), (tuple(vars(c).values()) for c in given), strict=True))
    places = sorted(range(len(given)), key=keys.__getitem__)
    return Predictions(tuple(given[i] for i in places), np.array(seconds)[places], terms[places])


def features(
    configs: Sequence[Config], problem: Problem, target: Target, templates: Sequence[str]
) -> tuple[Floats, Floats]:
    """Return the data that a correction is fitted to: uncorrected seconds, [n], and features, [n, features].

    Args:
        configs: candidates, each once.
        problem: the problem they compute.
        target: the GPU's architecture.
        templates: names of the templates that have a feature.
    """
    batch = _Batch.gather(configs, problem, target, [None] * len(configs))
    terms, seconds = _times(batch, problem, target, warm=False)
    return seconds, correction.features(configs, problem, target, batch.demand(terms, seconds), templates)


def predict(
    config: Config, problem: Problem, target: Target, built: Artifact | None = None, warm: bool = False
) -> Prediction:
    """Return the expected time of one launch of `config`, to the picosecond, with its terms; arguments as of `rank`."""
    return rank([config], problem, target, {config: built} if built else None, warm)[0]


@dataclass(frozen=True)
class _Batch:
    """Candidates as columns, an entry for each.

    Attributes:
        axes: values of `core.config.AXES`, [len(AXES), n].
        stages: blocks of K whose loads are under way, and the one being multiplied.
        registers: 32-bit registers that a thread wants.
        from_lds: 1 where matrix instructions read LDS themselves, else 0.
        iteration: one K iteration of one of their programs.
        waves: first and last waves of their launches; last ones that do not differ have a count of 0.
        spilled: bytes of scratch that a thread writes and reads each iteration.
        reduce: seconds to add up shared tiles.
        hidden: number of memory latencies that pass while the last kernel still ends.
        late: 1 where an iteration asks for its next block of B after its matrix instructions, else 0.
    """

    axes: Floats
    stages: Floats
    registers: Floats
    from_lds: Floats
    iteration: IterationCost[Floats]
    waves: tuple[Wave[Floats], Wave[Floats]]
    spilled: Floats
    reduce: Floats
    hidden: Floats
    late: Floats

    @classmethod
    def gather(
        cls, configs: Sequence[Config], problem: Problem, target: Target, built: Sequence[Artifact | None]
    ) -> _Batch:
        memo = ConfigMemo(configs)
        wanted = memo.map(lambda c: occupancy.wanted_registers(c, problem, target))
        fits = memo.map(lambda c, b, w: occupancy.programs_per_cu(c, problem, target, b, w), built, wanted)
        launches = memo.map(lambda c, f: _launch(c, problem, target, f), fits)
        last = Wave(*_columns([found[-1] for found, _ in launches]))
        only_one = np.array([len(found) == 1 for found, _ in launches])
        return cls(
            memo.axes(*AXES),
            np.array(memo.map(lambda c: occupancy.pipeline_stages(c, problem, target)), np.float64),
            np.array(wanted, np.float64),
            np.array(memo.map(lambda c: occupancy.async_matrix(c, target)), np.float64),
            IterationCost(*_columns(memo.map(lambda c: IterationCost.estimate(c, problem, target)))),
            (Wave(*_columns([found[0] for found, _ in launches])), replace(last, count=last.count * ~only_one)),
            np.array(memo.map(lambda c, b, w: spilled_bytes(c, problem, target, b, w), built, wanted), np.float64),
            np.array([combined for _, combined in launches]),
            np.array(memo.map(lambda c: _hidden(c, problem, target)), np.float64),
            np.array(memo.map(lambda c: _late(c, problem, target)), np.float64),
        )

    def demand(self, terms: Floats, seconds: Floats) -> Demand:
        """What features need, given the seconds of each of `TERMS` and of a launch."""
        resident, traffic = self.waves[0].resident, self.iteration.traffic
        return Demand(self.axes, terms, seconds, resident, self.registers, self.from_lds, traffic, self.stages)

    def axis(self, name: str) -> Floats:
        """The values of one of `core.config.AXES`, [n]."""
        return np.asarray(self.axes[AXES.index(name)])

    @property
    def block_m(self) -> Floats:
        """Rows of the tile."""
        return self.axis("block_m")

    @property
    def block_n(self) -> Floats:
        """Columns of the tile."""
        return self.axis("block_n")

    @property
    def group_m(self) -> Floats:
        """Rows of tiles that are walked together."""
        return self.axis("group_m")

    @property
    def warps(self) -> Floats:
        """Warps of a program."""
        return self.axis("num_warps")


def _hidden(config: Config, problem: Problem, target: Target) -> int:
    """Memory latencies that pass while the last kernel still ends; programs that stage rows of A have them anyway."""
    if occupancy.without_matrix_units(config) and not occupancy.has_single_row(config):
        return 0
    return min(1, config.option("ahead")) + config.option("early")


def _late(config: Config, problem: Problem, target: Target) -> bool:
    """Whether an iteration asks for its next block of B after its matrix instructions, which then hide no latency.

    So Triton 3.9 orders the loop where loads pass through registers and scales change along K (seen on gfx942); without
    such scales all loads come first.
    """
    scaled = problem.scale_depth > 0 and not problem.microscaled and target.has("register_staging")
    return scaled and config.is_generated and not occupancy.without_matrix_units(config)


def _launch(config: Config, problem: Problem, target: Target, fits: int) -> tuple[tuple[Wave[int], ...], float]:
    """The waves of a launch, and the seconds to add up shared tiles."""
    found = waves(config, problem, target, fits)
    return found, combine_seconds(config, problem, target, _cu_rate(target), found[-1])


def _columns(rows: Sequence[object]) -> Iterator[Floats]:
    """A column for each attribute of the dataclass that all `rows` are of."""
    known = {id(r): i for i, r in enumerate(rows)}
    distinct = np.array([list(vars(rows[i]).values()) for i in known.values()], np.float64)
    places = dict(zip(known, range(len(known)), strict=True))
    return iter(distinct[[places[id(r)] for r in rows]].T)


def _cu_rate(target: Target) -> float:
    """Bytes per second that one compute unit can draw from its L2."""
    return CU_BYTES_PER_CLOCK * target.clock_ghz * 1e9


def _times(batch: _Batch, problem: Problem, target: Target, warm: bool) -> tuple[Floats, Floats]:
    """Seconds of each of `TERMS`, [n, len(TERMS)], and of a launch, [n]."""
    clock, cu_rate = target.clock_ghz * 1e9, _cu_rate(target)
    iteration, scratch = batch.iteration, 2 * batch.spilled * batch.warps * target.wave_size / cu_rate
    terms = dict.fromkeys(TERMS, np.zeros(len(scratch)))
    seconds = np.zeros(len(scratch))
    latency, llc_felt, hbm_felt = _reach(batch, problem, target, warm)
    for wave in batch.waves:
        busy, resident = np.minimum(wave.programs, target.compute_units), wave.resident
        near = np.maximum(1.0, np.minimum(target.l2_neighbours, wave.programs / wave.shared))
        drawn = _drawn(batch, problem, near, iteration.a, iteration.b) / near * busy / (target.l2_gbps * 1e9)
        llc, hbm = _shared_seconds(batch, problem, target, wave)
        step = {
            "matrix": np.maximum(1.0, resident * batch.warps / SIMDS) * iteration.matrix,
            "lds": resident * iteration.lds,
            "l2": resident * np.maximum(iteration.issue, np.maximum(iteration.traffic / cu_rate, drawn)),
            "llc": llc * llc_felt,
            "hbm": hbm * hbm_felt,
            "latency": (latency + iteration.traffic / cu_rate) / np.maximum(1, batch.stages - 1) + SYNC_CLOCKS / clock,
            "scratch": resident * scratch,
        }
        own = np.maximum(1.0, batch.warps / SIMDS) * iteration.matrix + iteration.lds
        step["latency"] += np.where(batch.stages <= 1, step["matrix"] + step["lds"], batch.late * own)
        warps_a_simd = resident * batch.warps / SIMDS
        traffic = np.maximum(np.maximum(step["l2"], step["llc"]), step["hbm"])
        load = _overlap(QUEUE_OVERLAP, traffic, step["latency"])
        turns = np.minimum(MOST_OVERLAP, LEAST_OVERLAP + WARP_OVERLAP * warps_a_simd)
        compute = _overlap(turns, step["matrix"], step["lds"])
        step_seconds = _overlap(PIPELINE_OVERLAP, load, compute) + step["scratch"]
        # Nothing is computed while the first tile is loaded, nothing is loaded while the last one is computed.
        ends = latency + traffic + np.maximum(step["matrix"], step["lds"]) + step["scratch"]
        width = np.where(wave.shared > 1, PARTIAL_BYTES, problem.c.bytes)
        stored = resident * batch.block_m * batch.block_n * width
        epilogue = latency + stored / np.minimum(cu_rate, 2 * target.hbm_gbps * 1e9 / busy)
        seconds = seconds + wave.count * ((wave.loop - 1) * step_seconds + ends + epilogue)
        for name, value in step.items():
            terms[name] = terms[name] + wave.count * wave.loop * value
        terms["epilogue"] = terms["epilogue"] + wave.count * epilogue
    terms["reduce"] = batch.reduce
    terms["launch"] = terms["launch"] + target.launch_us * 1e-6
    visible = terms["launch"] - batch.hidden * target.memory_ns * 1e-9
    return np.stack([terms[name] for name in TERMS], axis=1), seconds + terms["reduce"] + visible


def _reach(batch: _Batch, problem: Problem, target: Target, warm: bool) -> tuple[Floats, Floats, Floats]:
    """Seconds until a load arrives, and what share of their traffic last-level cache and memory feel."""
    ones = np.ones(len(batch.warps))
    latency = target.memory_ns * 1e-9 * ones
    if not warm:
        return latency, ones, ones
    dies = np.minimum(target.xcds, batch.waves[0].programs)
    filled = sum(p.count * p.loop * _shared_seconds(batch, problem, target, p)[0] for p in batch.waves)
    near = filled * target.llc_gbps * 1e9 / dies <= target.l2_bytes
    far = problem.bytes > target.llc_bytes
    felt = np.where(near, 0.0, ones)
    return latency * np.where(near, L2_LATENCY, 1.0 if far else LLC_LATENCY), felt, felt if far else 0.0 * ones


def _overlap(power: Floats | float, one: Floats, other: Floats) -> Floats:
    """Between the sum (power 1) and the maximum (power infinite) of work that partly runs at once."""
    longest = np.maximum(one, other)
    return np.asarray(longest * ((one / longest) ** power + (other / longest) ** power) ** (1 / power))


def _drawn(batch: _Batch, problem: Problem, tiles: Floats, a: Floats, b: Floats) -> Floats:
    """Bytes of blocks of A and B that so many tiles, neighbours in launch order, need of one K iteration, each once.

    Tiles of different products of a batch have only an operand in common that all products share.
    """
    rows, columns = np.ceil(problem.m / batch.block_m), np.ceil(problem.n / batch.block_n)
    inside = np.minimum(tiles, rows * columns) if problem.batch > 1 else tiles
    tall = np.minimum(np.minimum(batch.group_m, rows), inside)
    wide = inside / tall
    taller = np.minimum(rows, tall * wide / columns)
    tall, wide = np.where(wide > columns, taller, tall), np.minimum(wide, columns)
    products = {name: 1.0 if problem.shared == name else tiles / inside for name in ("a", "b")}
    return np.asarray(products["a"] * tall * a + products["b"] * wide * b)


def _shared_seconds(batch: _Batch, problem: Problem, target: Target, wave: Wave[Floats]) -> tuple[Floats, Floats]:
    """Seconds of last-level cache and of memory per K iteration: what the programs under way do not share.

    Programs on one die, neighbours in launch order, share its L2; those of all dies share the last-level cache.
    """
    far = batch.iteration.far_a, batch.iteration.far_b
    tiles = wave.programs / wave.shared
    dies = np.minimum(target.xcds, wave.programs)
    llc = dies * wave.shared * _drawn(batch, problem, np.maximum(1.0, tiles / dies), *far)
    hbm = wave.shared * _drawn(batch, problem, np.maximum(1.0, tiles), *far)
    return llc / (target.llc_gbps * 1e9), hbm / (target.hbm_gbps * 1e9)

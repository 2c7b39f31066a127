"""Models a compute unit and the memories behind it analytically, and ranks kept configs.

The model prunes and seeds; its times do not replace measurements. Every figure is a fact of the `Target` or one of the
constants below, none is fitted per size; where tables of a target were recorded, `correction` adds a fitted factor.
Times are seconds unless a name says otherwise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np

from tritongemm.codegen.config_memo import ConfigMemo
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.searching import TERMS, Floats, Prediction, Predictions
from tritongemm.search.cost_model import correction
from tritongemm.search.cost_model.launch_columns import LaunchColumns, ProgramColumns, cu_rate
from tritongemm.search.cost_model.occupancy import SIMDS
from tritongemm.search.cost_model.tile_cost import alignments
from tritongemm.search.cost_model.waves import PARTIAL_BYTES, Wave
from tritongemm.search.typical import typical

# clocks of the barrier, the waits and the branch of one K iteration
SYNC_CLOCKS = 200
# A load that hits in L2, or in the last-level cache, takes this share of the latency of one that misses both: rounded
# guesses, used only for operands that stay in caches.
L2_LATENCY, LLC_LATENCY = 0.3, 0.8
# The powers of `_overlap` say how well work hides other work, from 1 (not at all) up: a queue's waiting and its
# traffic, and loads and arithmetic of a pipelined loop; then LDS and matrix units, which hide each other better with
# more warps on a SIMD to take turns: the least, the gain of each warp, and the most.
QUEUE_OVERLAP, PIPELINE_OVERLAP = 3.0, 5.0
LEAST_OVERLAP, WARP_OVERLAP, MOST_OVERLAP = 1.5, 0.5, 5.0
# problems that are predicted at once: few enough for their columns to stay in a core's caches
_AT_ONCE = 128
_SIZES = attrgetter("m", "n", "k", "batch")
_KIND = attrgetter(*(f.name for f in fields(Problem) if f.name not in ("m", "n", "k", "batch")))


def rank(
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    built: Mapping[Config, Artifact] | None = None,
    warm: bool = False,
) -> Predictions:
    """Return predictions for `configs`, fastest first; of equal times the larger tile first, then the taller.

    `built` has compiled configs, whose registers, spills and LDS replace the estimates. Warm launches follow each other
    on the same operands, which stay in the caches that hold them; our own timers never do that, some foreign tuners
    always do.
    """
    given, problem = tuple(configs), typical(problem)
    if not given:
        return Predictions((), np.empty(0), np.empty((0, len(TERMS))))
    artifacts = [built.get(c) for c in given] if built else [None] * len(given)
    launches = LaunchColumns.gather(given, problem, target, artifacts)
    terms, exact = _seconds(launches, given, problem, target, warm)
    seconds = [round(s, 12) for s in exact.tolist()]  # to the picosecond, so that rounding errors decide nothing

    block_m, block_n = (launches.programs.axis(name) for name in ("block_m", "block_n"))
    areas, heights = -block_m * block_n, -block_m
    # The attributes of configs in this order sort them as configs sort, and faster.
    keys = list(zip(seconds, areas.tolist(), heights.tolist(), (tuple(vars(c).values()) for c in given), strict=True))
    places = sorted(range(len(given)), key=keys.__getitem__)
    return Predictions(tuple(given[i] for i in places), np.array(seconds)[places], terms[places])


def best_seconds(
    configs: Sequence[Config], problems: Sequence[Problem], target: Target, report: Callable[[int], None]
) -> Floats:
    """Return the predicted seconds of the fastest of a few configs for each of many problems, [problems].

    They are those of `rank`, in a small part of its time: problems whose programs are the same, as they differ in sizes
    alone, are computed together. Each config launches a program for each tile. `report` is called with the number of
    problems that are done, many times a second.
    """
    found, usual = np.empty(len(problems)), [typical(problem) for problem in problems]
    depths = {c.block_k for c in configs}
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, p in enumerate(usual):
        key = _KIND(p), p.batch > 1, alignments(p), *(p.k % depth == 0 for depth in depths)
        alike.setdefault(key, []).append(place)
    done = 0
    for places in alike.values():
        sample = usual[places[0]]
        programs = ProgramColumns.gather(ConfigMemo(configs), sample, target, [None] * len(configs))
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            sizes = np.array([_SIZES(usual[place]) for place in some], np.float64).T
            launches = LaunchColumns.of_sizes(programs.repeated(len(some)), sizes.repeat(len(configs), axis=1), target)
            _, seconds = _seconds(launches, configs, sample, target, warm=False)
            found[some] = seconds.reshape(len(some), -1).min(axis=1).round(12)
            done += len(some)
            report(done)
    return found


def features(
    configs: Sequence[Config], problem: Problem, target: Target, templates: Sequence[str]
) -> tuple[Floats, Floats]:
    """Return the data that a correction is fitted to: uncorrected seconds, [n], and features, [n, features]."""
    launches = LaunchColumns.gather(configs, problem, target, [None] * len(configs))
    terms, seconds = _times(launches, problem, target, warm=False)
    return seconds, correction.features(configs, problem, target, launches.demand(terms, seconds), templates)


def predict(
    config: Config, problem: Problem, target: Target, built: Artifact | None = None, warm: bool = False
) -> Prediction:
    """Return the expected time of one launch of `config`, to the picosecond, with its terms; arguments as of `rank`."""
    return rank([config], problem, target, {config: built} if built else None, warm)[0]


def _seconds(
    launches: LaunchColumns, configs: Sequence[Config], problem: Problem, target: Target, warm: bool
) -> tuple[Floats, Floats]:
    """Return `_times`, with seconds that are corrected where tables of such problems were recorded."""
    terms, seconds = _times(launches, problem, target, warm)
    fitted = None if warm else correction.fitted(target.name)
    if fitted and fitted.covers(problem):
        rows = correction.features(configs, problem, target, launches.demand(terms, seconds), fitted.templates)
        seconds = seconds * fitted.factors(configs, rows)
    return terms, seconds


def _times(launches: LaunchColumns, problem: Problem, target: Target, warm: bool) -> tuple[Floats, Floats]:
    """Return the seconds of each of `TERMS`, [n, len(TERMS)], and of a launch, [n]."""
    clock, rate = target.clock_ghz * 1e9, cu_rate(target)
    programs, warps = launches.programs, launches.programs.warps
    iteration, scratch = programs.iteration, 2 * programs.spilled * warps * target.wave_size / rate
    terms = dict.fromkeys(TERMS, np.zeros(len(scratch)))
    seconds = np.zeros(len(scratch))
    latency, llc_felt, hbm_felt = _reach(launches, problem, target, warm)
    for wave in launches.waves:
        busy, resident = np.minimum(wave.programs, target.compute_units), wave.resident
        near = np.maximum(1.0, np.minimum(target.l2_neighbours, wave.programs / wave.shared))
        drawn = _drawn(launches, problem, near, iteration.a, iteration.b) / near * busy / (target.l2_gbps * 1e9)
        llc, hbm = _shared_seconds(launches, problem, target, wave)
        step = {
            "matrix": np.maximum(1.0, resident * warps / SIMDS) * iteration.matrix,
            "lds": resident * iteration.lds,
            "l2": resident * np.maximum(iteration.issue, np.maximum(iteration.traffic / rate, drawn)),
            "llc": llc * llc_felt,
            "hbm": hbm * hbm_felt,
            "latency": (latency + iteration.traffic / rate) / programs.ahead
            + np.where(programs.turns, 0, SYNC_CLOCKS) / clock,
            "scratch": resident * scratch,
        }
        own = np.maximum(1.0, warps / SIMDS) * iteration.matrix + iteration.lds
        step["latency"] += np.where(programs.stages <= 1, step["matrix"] + step["lds"], programs.late * own)
        warps_a_simd = resident * warps / SIMDS
        traffic = np.maximum(np.maximum(step["l2"], step["llc"]), step["hbm"])
        load = _overlap(QUEUE_OVERLAP, traffic, step["latency"])
        power = np.minimum(MOST_OVERLAP, LEAST_OVERLAP + WARP_OVERLAP * warps_a_simd)
        compute = _overlap(np.where(programs.turns, MOST_OVERLAP, power), step["matrix"], step["lds"])
        compute = np.maximum(compute, programs.clocks / clock)
        step_seconds = _overlap(PIPELINE_OVERLAP, load, compute) + step["scratch"]
        # Nothing is computed while the first tile is loaded, nothing is loaded while the last one is computed.
        ends = latency + traffic + np.maximum(step["matrix"], step["lds"]) + step["scratch"]
        width = np.where(wave.shared > 1, PARTIAL_BYTES, problem.c.type.bytes)
        stored = resident * programs.axis("block_m") * programs.axis("block_n") * width
        epilogue = latency + stored / np.minimum(rate, 2 * target.hbm_gbps * 1e9 / busy)
        seconds = seconds + wave.count * ((wave.loop - 1) * step_seconds + ends + epilogue)
        for name, value in step.items():
            terms[name] = terms[name] + wave.count * wave.loop * value
        terms["epilogue"] = terms["epilogue"] + wave.count * epilogue
    terms["reduce"] = launches.reduce
    terms["launch"] = terms["launch"] + target.launch_us * 1e-6
    visible = terms["launch"] - programs.hidden * target.memory_ns * 1e-9
    return np.stack([terms[name] for name in TERMS], axis=1), seconds + terms["reduce"] + visible


def _reach(launches: LaunchColumns, problem: Problem, target: Target, warm: bool) -> tuple[Floats, Floats, Floats]:
    """Return the seconds until a load arrives, and the shares of the traffic that last-level cache and memory carry."""
    ones = np.ones(len(launches.tiles))
    latency = target.memory_ns * 1e-9 * ones
    if not warm:
        return latency, ones, ones
    dies = np.minimum(target.xcds, launches.waves[0].programs)
    filled = sum(p.count * p.loop * _shared_seconds(launches, problem, target, p)[0] for p in launches.waves)
    near = filled * target.llc_gbps * 1e9 / dies <= target.l2_bytes
    far = problem.bytes > target.llc_bytes
    felt = np.where(near, 0.0, ones)
    return latency * np.where(near, L2_LATENCY, 1.0 if far else LLC_LATENCY), felt, felt if far else 0.0 * ones


def _overlap(power: Floats | float, one: Floats, other: Floats) -> Floats:
    """Return the time of work that partly runs at once, between the sum (power 1) and the maximum (power infinite)."""
    longest = np.maximum(one, other)
    return np.asarray(longest * ((one / longest) ** power + (other / longest) ** power) ** (1 / power))


def _drawn(launches: LaunchColumns, problem: Problem, tiles: Floats, a: Floats, b: Floats) -> Floats:
    """Return the bytes of blocks of A and B that `tiles` tiles, neighbours in launch order, need of one K iteration.

    Tiles of different products of a batch have only an operand in common that all products share.
    """
    rows, columns = launches.rows, launches.columns
    inside = np.minimum(tiles, rows * columns) if problem.batch > 1 else tiles
    tall = np.minimum(np.minimum(launches.programs.axis("group_m"), rows), inside)
    wide = inside / tall
    taller = np.minimum(rows, tall * wide / columns)
    tall, wide = np.where(wide > columns, taller, tall), np.minimum(wide, columns)
    products = {name: 1.0 if one.shared else tiles / inside for name, one in (("a", problem.a), ("b", problem.b))}
    return np.asarray(products["a"] * tall * a + products["b"] * wide * b)


def _shared_seconds(
    launches: LaunchColumns, problem: Problem, target: Target, wave: Wave[Floats]
) -> tuple[Floats, Floats]:
    """Return the seconds of last-level cache and of memory per K iteration: what the programs under way do not share.

    Programs on one die, neighbours in launch order, share its L2; those of all dies share the last-level cache.
    """
    far = launches.programs.iteration.far_a, launches.programs.iteration.far_b
    tiles = wave.programs / wave.shared
    dies = np.minimum(target.xcds, wave.programs)
    llc = dies * wave.shared * _drawn(launches, problem, np.maximum(1.0, tiles / dies), *far)
    hbm = wave.shared * _drawn(launches, problem, np.maximum(1.0, tiles), *far)
    return llc / (target.llc_gbps * 1e9), hbm / (target.hbm_gbps * 1e9)

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.support.nouns import Artifact, Config, Defaults, Family, Groups, Patch, cases, each, make_problem, registry
from tritongemm.core import target
from tritongemm.core.artifact import LoopFacts
from tritongemm.core.problem import Problem, matrices
from tritongemm.search.cost_model import occupancy
from tritongemm.search.cost_model.model import best_seconds, predict, rank
from tritongemm.search.cost_model.tile_cost import IterationCost
from tritongemm.search.pruning.prune import prune
from tritongemm.search.pruning.rules import resources
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

GFX942, SM90 = target_files.load_target("gfx942"), target_files.load_target("sm90")
LARGE = Problem(4096, 4096, 4096, *matrices(layout="TN"))
TILE = Config("tile", 256, 256, 64, group_m=4, num_warps=8, options=(("kpack", 2), ("matrix_instr_nonkdim", 16)))


def first_tiles(problem: Problem, target: target.Target, count: int = 3) -> list[tuple[int, int, int]]:
    kept = prune(space(problem, target, templates=("tile",)), problem, target).kept
    return list(dict.fromkeys(p.config.tile for p in rank(kept, problem, target)))[:count]


def test_ranks_are_sorted_and_more_work_takes_longer() -> None:
    kept = prune(space(LARGE, GFX942), LARGE, GFX942).kept
    ordered = rank(kept, LARGE, GFX942)
    assert {p.config for p in ordered} == set(kept) and len(ordered) == len(kept)
    assert [p.seconds for p in ordered] == sorted(p.seconds for p in ordered)
    assert [p.config for p in rank(reversed(kept), LARGE, GFX942)] == [p.config for p in ordered]
    assert first_tiles(LARGE, GFX942)[0] == (256, 256, 64)
    assert all(m == 16 for m, _, _ in first_tiles(Problem(1, 8192, 28672, *matrices(layout="TN")), GFX942))
    assert (128, 256, 64) in first_tiles(LARGE, SM90, 5)
    times = [predict(TILE, Problem(4096, 4096, k), GFX942).seconds for k in (512, 1024, 4096, 16384)]
    assert times == sorted(times) and times[-1] > 10 * times[0]
    problem = Problem(16, 1280, 8192, *matrices("bf16", layout="TN"))
    counted = Config("tma", 16, 64, 128, 1, 6, 4, 5, options=(("poll", 0), ("swap_ab", 1)))
    looked_for = replace(counted, options=(("poll", 1), ("swap_ab", 1)))
    assert 0 < predict(looked_for, problem, SM90).terms["reduce"] < predict(counted, problem, SM90).terms["reduce"]


@each("name", target_files.target_names())
@each("dtype", ["fp16", "bf16", "fp32", "int8", "fp8e4m3fn", "fp8e4m3fnuz"])
def test_every_target_and_dtype_is_slower_than_its_roofline(name: str, dtype: str) -> None:
    target = target_files.load_target(name)
    problem = Problem(2048, 2048, 2048, *matrices(dtype, c="fp16"))
    found = predict(Config("tile", 128, 128, 64), problem, target)
    if target.supports(problem.a.type):
        assert found.seconds > target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)


@each("template", ["tile", "persistent", "stream_k", "gemv", "not_known_yet"])
def test_templates_all_get_a_finite_time(template: str) -> None:
    for size in [(1, 1, 1), (1, 8192, 28672), (4097, 4097, 4096)]:
        assert 0 < predict(replace(TILE, template=template), Problem(*size), GFX942).seconds < 1


EVEN, ODD = Problem(256 * 19, 4096, 4096), Problem(256 * 20, 4096, 4096)  # 304 and 320 tiles for 304 compute units
STREAM_K = replace(TILE, template="stream_k", options=(*TILE.options, ("num_sms", 304)))
FEW_TILES, SHORT_K = Problem(1, 1024, 65536), Problem(1, 1024, 1024)
LOW = Config("tile", 16, 128, 128, num_warps=8)
AT_ONCE, SPILLS = (Config("tma", m, 256, 64, num_warps=8) for m in (128, 256))  # asynchronous instructions' sums


@cases(
    ((TILE, ODD), (TILE, EVEN), GFX942, 1.5),  # a tile more than fills the device costs a round
    ((TILE, ODD), (STREAM_K, ODD), GFX942, 1),
    ((LOW, FEW_TILES), (replace(LOW, split_k=8), FEW_TILES), GFX942, 1),
    ((replace(LOW, split_k=8), SHORT_K), (LOW, SHORT_K), GFX942, 1),
    ((TILE, Problem(4096, 4096, 4097, *matrices(layout="TN"))), (TILE, LARGE), GFX942, 1.2),  # unaligned rows
    ((SPILLS, LARGE), (AT_ONCE, LARGE), SM90, 2),
)
def test_what_takes_longer(slower: Any, faster: Any, target: target.Target, ratio: float, /) -> None:
    long, short = (predict(config, problem, target).seconds for config, problem in (slower, faster))
    assert long > ratio * short


def test_a_row_a_warp_hides_more_latency_than_rows_in_turn() -> None:
    """Where a thread loads once an iteration, compilers issue the loads of several together."""
    problem, hopper = (Problem(1, 4096, 4096, *matrices(layout="TN")), target_files.load_target("sm90", "H200"))
    one, four = (predict(Config("gemv", 1, n, 256, num_warps=1), problem, hopper) for n in (1, 4))
    assert one.terms["latency"] < four.terms["latency"] and one.seconds < four.seconds
    early = Config("gemv", 1, 1, 256, num_warps=1, options=(("ahead", 1), ("early", 1)))
    assert predict(early, problem, hopper).seconds < one.seconds


def test_small_programs_follow_each_other_without_rounds() -> None:
    """A few programs more than the device holds take a little longer, not a round of their own."""
    hopper, config = target_files.load_target("sm90", "H200"), Config("gemv", 1, 1, 256, num_warps=1)
    times = [
        predict(config, Problem(1, n, 4096, *matrices(layout="TN")), hopper).seconds for n in (16000, 20000, 24000)
    ]
    steps = [later - sooner for sooner, later in pairwise(times)]
    assert max(steps) < 1.01 * min(steps)


def test_programs_take_turns_and_hoppers_loads_are_early() -> None:
    def seconds(programs: int, problem: Problem, **options: int) -> float:
        named = tuple({**dict(TILE.options), "num_sms": programs, **options}.items())
        return predict(replace(TILE, template="stream_k", options=named), problem, GFX942).seconds

    even, less = Problem(256 * 19, 4096, 4096), Problem(256 * 8, 4096, 4096)  # 304 and 128 tiles
    assert seconds(304, even) == predict(TILE, even, GFX942).seconds  # nothing is left over
    assert seconds(608, less) > seconds(304, less)  # one such program fits on a CU: no more work at once
    assert seconds(304, less, share_more=1) == seconds(304, less)  # there is no full round to share
    problem = make_problem(Defaults.of(layout="TN", family="a8w8_blockscale"), 1024, 1536, 7168)
    plain = replace(problem, family="gemm").scaled((None, None))
    config = Config("tile", 64, 64, 128, num_warps=4, num_stages=3)
    assert predict(config, problem, SM90).terms["latency"] == predict(config, plain, SM90).terms["latency"]
    tall, wide = replace(TILE, block_m=256, block_n=128), replace(TILE, block_m=128, block_n=256)
    ordered = rank([wide, tall], Problem(4096, 4096, 4096, *matrices(layout="TN")), GFX942)
    assert ordered[0].seconds == ordered[1].seconds and ordered[0].config == tall


def test_stream_k_is_ranked_by_what_it_cuts() -> None:
    """Times of an H200, in the order of tiles: the model had the tile of 64 rows first while it left the cuts out."""
    problem = Problem(777, 5120, 5120, *matrices("bf16", layout="TN"))
    measured = {(128, 128, 64): 95.0, (64, 128, 64): 104.6, (64, 64, 128): 135.1, (64, 64, 64): 150.3}
    configs = [Config("stream_k_tma", *tile, group_m=8, num_warps=8, num_stages=4) for tile in measured]
    order = [p.config.tile for p in rank(configs, problem, target_files.load_target("sm90", "H200"))]
    assert order[0] == (128, 128, 64) and order[-1] == (64, 64, 64)


def test_neighbours_share_what_they_draw_from_l2() -> None:
    """In pairs of rows eight neighbours draw two blocks of A and four of B; row by row one of A and eight of B."""
    problem = Problem(256, 8192, 3584, *matrices(layout="TN"))
    row = Config("tma", 128, 128, 64, 1, 1, 4, 6)
    pairs = replace(row, group_m=2)
    apart = replace(SM90, l2_neighbours=1)
    assert predict(pairs, problem, SM90).seconds < predict(row, problem, SM90).seconds
    assert predict(pairs, problem, apart).terms["l2"] == pytest.approx(predict(row, problem, apart).terms["l2"])


def test_loads_are_hidden_or_shared_as_the_memory_has_them() -> None:
    deep, flat = Config("tile", 64, 64, 256, num_warps=8), Config("tile", 64, 64, 64, num_warps=8)
    short, long = (Problem(1024, 1024, k, *matrices(layout="TN")) for k in (256, 8192))
    once = predict(deep, short, GFX942)
    alone = sum(once.terms[name] for name in ("l2", "lds", "epilogue", "launch")) + GFX942.memory_ns * 1e-9
    assert once.seconds == pytest.approx(alone)
    gain = [predict(flat, p, GFX942).seconds / predict(deep, p, GFX942).seconds for p in (short, long)]
    assert gain[0] < 0.8 * gain[1]
    along, across = Problem(1024, 1024, 1024, *matrices(layout="TN")), Problem(1024, 1024, 1024, *matrices())
    narrow = Config("tile", 64, 64, 64, options=(("matrix_instr_nonkdim", 16),))
    wide = replace(narrow, options=(("matrix_instr_nonkdim", 32),))
    lds = {(c, p): predict(c, p, GFX942).terms["lds"] for c in (narrow, wide) for p in (along, across)}
    assert lds[narrow, along] == lds[wide, along] < lds[wide, across] < lds[narrow, across]
    half, entire = Config("tile", 128, 128, 32), Config("tile", 128, 128, 64)
    seconds = [predict(c, LARGE, GFX942).terms["l2"] for c in (half, entire)]
    assert 1.5 < seconds[0] / seconds[1] < 2.5
    small, middle, large = Problem(64, 256, 2048), Problem(4096, 4096, 4096), Problem(16384, 16384, 16384)
    for problem, gone in [(small, {"llc", "hbm"}), (middle, {"hbm"}), (large, set())]:
        cold, warm = (predict(TILE, problem, GFX942, warm=w) for w in (False, True))
        assert {name for name in cold.terms if warm.terms[name] == 0 < cold.terms[name]} == gone
        assert warm.seconds < cold.seconds if gone else warm.seconds == cold.seconds


def test_late_loads_are_hidden_by_a_compute_units_other_programs() -> None:
    """With scales along K, gfx942's kernels load B after they multiply; AMD's tables have these smaller tiles."""
    blocks = Defaults.of(layout="TN", family="a8w8_blockscale", fp8_encoding="fnuz")
    for m, n, k, small, large in (
        (1024, 1536, 7168, (64, 64), (128, 64)),
        (128, 7168, 2048, (32, 32), (64, 64)),
        (256, 1536, 1536, (32, 32), (64, 32)),
    ):
        problem = make_problem(blocks, m, n, k)
        plain = replace(problem, family="gemm").scaled((None, None))
        configs = [
            replace(TILE, block_m=rows, block_n=columns, block_k=128, num_warps=warps)
            for rows, columns in (small, large)
            for warps in (4, 8)
        ]
        assert rank(configs, problem, GFX942, warm=True)[0].config.tile[:2] == small
        assert rank(configs, plain, GFX942, warm=True)[0].config.tile[:2] == large
        late = predict(configs[0], problem, GFX942).terms["latency"]
        assert late > 1.02 * predict(configs[0], plain, GFX942).terms["latency"]


def test_the_binary_corrects_the_estimate() -> None:
    good = Artifact(TILE, "x", registers=256, shared=65536, threads=512)
    spilling = replace(good, spills=1024)
    assert predict(TILE, LARGE, GFX942, spilling).seconds > 1.5 * predict(TILE, LARGE, GFX942, good).seconds
    terms = rank([TILE], LARGE, GFX942, {TILE: spilling})[0].terms
    assert max(terms, key=terms.__getitem__) == "scratch"
    small = Config("tile", 64, 64, 64)
    lean, fat = (Artifact(small, "x", registers=r, shared=16384, threads=256) for r in (64, 512))
    assert occupancy.programs_per_cu(small, LARGE, GFX942, lean) == 4
    assert occupancy.programs_per_cu(small, LARGE, GFX942, fat) == 1


@each("name", target_files.target_names())
def test_what_a_binarys_loop_has_takes_part_on_every_target(name: str) -> None:
    """Instructions that are issued, loads that are waited for at once, spilled registers; not those of PTX."""
    facts, config = target_files.load_target(name), Config("tile", 64, 64, 64)
    lean = LoopFacts(instructions=100, matrix=64, loads=8, narrow=0, spilled=0, drains=0, ahead=1.5)

    def seconds(loop: LoopFacts) -> float:
        return predict(config, LARGE, facts, Artifact(config, "x", registers=64, threads=128, loop=loop)).seconds

    for worse in ({"instructions": 20_000}, {"ahead": 0.0}, {"spilled": 2048}):
        assert seconds(replace(lean, **worse)) > seconds(lean), worse
    assert seconds(replace(lean, spilled=None, instructions=20_000)) == seconds(replace(lean, spilled=None))


@cases(
    # Seen in Triton 3.9 binaries of a plain fp16 kernel.
    ("gfx942", Config("tile", 64, 64, 64), 16384),
    ("gfx942", Config("tile", 64, 64, 64, num_stages=1), 8192),
    ("gfx942", Config("tile", 64, 64, 64, num_stages=3), 32768),
    ("gfx1100", Config("tile", 128, 128, 32), 16384),
    ("sm80", Config("tile", 64, 64, 64, num_stages=4), 49152),
    ("sm120", Config("tile", 128, 64, 64, num_stages=5), 98304),
    ("gfx1201", Config("tile", 128, 256, 32, num_warps=8), 24576),
    ("sm90", Config("tile", 64, 64, 64, num_stages=4), 65536),
    ("sm90", Config("tile", 32, 64, 64, num_stages=3), 24576),
)
def test_lds_is_what_triton_allocates(name: str, config: Config, shared: int, /) -> None:
    assert occupancy.lds_bytes(config, LARGE, target_files.load_target(name)) == shared


@cases(
    # Seen in Triton 3.6 binaries; scales and the epilogue take the rest.
    (Config("tile", 64, 128, 128, num_warps=8, num_stages=3), 61440),
    (Config("tile", 64, 32, 512, num_warps=4, num_stages=5), 131072),
    (Config("tile", 128, 64, 512, num_warps=8, num_stages=4, options=(("swap_ab", 1),)), 282624),
    (Config("tma", 64, 256, 256, num_warps=4, num_stages=3), 213024),
    (Config("tile", 32, 64, 256, num_warps=8, num_stages=3), 25600),  # multiplied by instructions of one warp
)
def test_fp4_that_is_unpacked_takes_lds_as_bf16_too(config: Config, seen: int, /) -> None:
    fp4 = registry.get(Family, "a4w4_blockscale")
    problem = fp4.problem(Problem(256, 4096, 7168, *matrices("fp4e2m1", c="bf16", layout="TN")))
    assert 0.93 * seen <= occupancy.lds_bytes(config, problem, target_files.load_target("sm90")) <= seen


@cases(
    # Seen in Triton 3.6 and 3.9 binaries of fp8; barriers and factors take the rest.
    ((128, 256, 128), 3, 1, 214040),
    ((128, 256, 128), 3, 2, 181272),
    ((128, 256, 128), 4, 1, 263200),
    ((64, 256, 128), 4, 2, 181280),
    ((64, 64, 64), 4, 1, 40992),
)
def test_storing_c_takes_lds_of_rings(tile: tuple[int, int, int], num_stages: int, parts: int, seen: int, /) -> None:
    config = Config("persistent", *tile, num_warps=8, num_stages=num_stages, options=(("epilogue_parts", parts),))
    fp8 = registry.get(Family, "a8w8")
    problem = fp8.problem(Problem(512, 4096, 4096, *matrices("fp8e4m3fn", c="bf16", layout="TN")))
    sm90 = target_files.load_target("sm90")
    guess = occupancy.lds_bytes(config, problem, sm90) + occupancy.stored_bytes(config, problem)
    assert 0.99 * seen <= guess <= seen
    assert resources.lds(config, problem, sm90) == (f"LDS {guess} > 232448" if seen > 232448 else None)


@each(("tile", "num_warps", "seen"), [((64, 64, 64), 4, 94), ((128, 128, 64), 4, 182), ((128, 128, 64), 2, 314)])
def test_registers_are_near_what_triton_uses(tile: tuple[int, int, int], num_warps: int, seen: int) -> None:
    guess = occupancy.wanted_registers(Config("tile", *tile, num_warps=num_warps), LARGE, GFX942)
    assert abs(guess - seen) <= 0.1 * seen


@pytest.mark.parametrize("chip", [GFX942, SM90], ids=lambda chip: chip.name)
def test_many_problems_at_once_have_the_times_of_each(chip: target.Target, monkeypatch: Patch) -> None:
    """To the last digit, in any order; programs are looked at once for each kind of problem, not for each problem."""
    tiles = [Config("tile", m, 64, 64, split_k=split, num_warps=4, num_stages=2) for m in (16, 128) for split in (1, 4)]
    sizes = [(1, 64, 4096), (300, 777, 4096), (9000, 8192, 100), (64, 64, 1000), (64, 64, 1001), (5, 4096, 64)]
    kinds = (("TN", "none", 1), ("NT", "n", 1), ("TN", "none", 3))
    problems = [
        Problem(*size, *matrices("bf16", layout=layout), bias, batch) for size in sizes for layout, bias, batch in kinds
    ]
    problems.append(Problem(512, 64, 64, *matrices("bf16", layout="TN"), groups=Groups(4)))
    looked_at, reported = set[int](), list[int]()
    estimate = IterationCost.estimate

    def look(config: Config, problem: Problem, at: target.Target) -> IterationCost[float]:
        looked_at.add(id(problem))
        return estimate(config, problem, at)

    monkeypatch.setattr(IterationCost, "estimate", look)
    found = best_seconds(tiles, [*problems, *(replace(p, m=64 * p.m) for p in problems)], chip, reported.append)
    assert len(looked_at) < len(problems) and reported[-1] == 2 * len(problems)
    assert found[: len(problems)].tolist() == [rank(tiles, p, chip)[0].seconds for p in problems]

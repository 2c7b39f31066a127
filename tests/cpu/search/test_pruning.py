from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.nouns import Groups, Patch, Problem, cases, each, matrices, space
from tests.support.nouns import loader as target_files
from tests.support.products import product
from tritongemm.codegen.template_facts import search_facts
from tritongemm.core import target
from tritongemm.core.config import AXES, Config
from tritongemm.core.space import SearchLimits, Space, TemplateSpace
from tritongemm.search.cost_model.model import rank
from tritongemm.search.planner import plan_search
from tritongemm.search.pruning.prune import prune
from tritongemm.search.pruning.rules import RULES, Rule

GFX942, SM90 = target_files.load_target("gfx942"), target_files.load_target("sm90")
ODD = [(4097, 4097, 4096), (2050, 2050, 512), (1, 8192, 28672), (64, 64, 70), (1, 1, 1), (16, 16, 16), (1000, 1, 333)]


@pytest.fixture(scope="module")
def wide() -> Space:
    """The complete tune_gemm space, which is the same for every problem."""
    return space(Problem(1, 1, 1), GFX942, "tune_gemm", ("tile",))


def reasons(config: Config, problem: Problem, target: target.Target) -> dict[str, str]:
    applies = [r for r in RULES if not r.group or r.group in search_facts(config.template).rules]
    return {r.name: why for r in applies if (why := r.check(config, problem, target))}


def test_guard_skips_the_rule_that_would_leave_nothing(wide: Space) -> None:
    problem, rule = Problem(4097, 4097, 4096), Rule("all", lambda c, p, t: "no")
    pruned = prune(wide, problem, GFX942, (rule, Rule("thin", lambda c, p, t: "no" if c.split_k > 1 else None)))
    assert pruned.kept and pruned.skipped == ("all",) and pruned.removed["all"] == 0 < pruned.removed["thin"]
    assert not prune(wide, problem, GFX942, (rule,), never_zero=False).kept
    nothing = prune(pruned.kept[:3], problem, GFX942, (rule,))
    assert nothing.kept == pruned.kept[:3] and nothing.skipped == ("all",) and prune([], problem, GFX942).kept == ()


@each("name", target_files.target_names())
@each("size", ODD)
def test_odd_sizes_keep_candidates_unaided(name: str, size: tuple[int, int, int]) -> None:
    target, problem = target_files.load_target(name), Problem(*size)
    entire = space(problem, target, templates=("tile",))
    # A corner of the space (one group_m, split_k and value of each option) is enough: what is kept there is kept.
    short = ("group_m", "split_k")
    axes = [(n, v[:1] if n in short or n not in AXES else v) for n, v in entire.axes[0].values]
    pruned = prune(replace(entire, axes=(TemplateSpace("tile", tuple(axes)),)), problem, target)
    assert pruned.kept and not pruned.skipped


def test_counts_stay_in_hand_and_reasons_carry_numbers() -> None:
    def kept(target: target.Target, m: int, n: int, k: int) -> int:
        problem = Problem(m, n, k)
        return len(prune(space(problem, target, templates=("tile",)), problem, target).kept)

    assert 300 <= kept(SM90, 4096, 4096, 4096) <= 1500 and 1 <= kept(GFX942, 16, 16, 16) < 60
    big = Config("tile", 256, 256, 128, num_warps=8)
    problem = Problem(4096, 4096, 4096)
    assert reasons(big, problem, GFX942) == {"lds": "LDS 131072 > 65536"}
    pruned = prune([big, Config("tile", 128, 128, 64)], problem, GFX942)
    assert pruned.removed["lds"] == 1 and pruned.reasons["lds"] == f"{big.name}: LDS 131072 > 65536"
    fp8 = Problem(128, 128, 128, *matrices("fp8e4m3fn", c="fp16"))
    assert "dot_k" in reasons(Config("tile", 64, 64, 16), fp8, SM90)


@cases(
    (Config("tile", 64, 64, 64, split_k=4), (4096, 4096, 4096), "split_k"),
    (Config("tile", 64, 64, 64, split_k=4), (64, 64, 256), "split_k"),
    (Config("tile", 64, 64, 64, group_m=8), (128, 4096, 4096), "group_m"),
    (Config("tile", 64, 16, 64), (16, 16, 64), "fits_m"),
    (Config("tile", 16, 16, 256, num_warps=1), (16, 16, 64), "fits_k"),
    (Config("tile", 16, 16, 16, num_warps=4), (16, 16, 16), "few_instructions"),
    (Config("tile", 256, 256, 32, num_warps=1), (4096, 4096, 4096), "accumulator"),
    (Config("tile", 16, 16, 64, num_warps=1), (4096, 4096, 4096), "small_tile"),
    (Config("tile", 16, 64, 64, options=(("matrix_instr_nonkdim", 32),)), (16, 64, 64), "nonkdim_size"),
    (Config("tile", 256, 16, 64), (4096, 16, 2**23), "offsets"),  # 2 ** 31 elements of A in a tile
    (Config("gemv", 1, 64, 256), (64, 64, 256), "vector_rows"),
    (Config("gemv", 4, 64, 256), (2, 64, 256), "fits_m"),
    (Config("gemv", 1, 4, 256, options=(("prefetch", 3),)), (1, 64, 1024), "straight"),
    (Config("tile", 16, 128, 256, num_warps=1), (16, 4096, 4096), "unrolled"),  # 512 elements of B each
    (Config("stream_k", 256, 256, 64), (4864, 4096, 4096), "stream_k"),  # 304 tiles for 304 CUs
    (Config("stream_k", 64, 64, 64), (64, 256, 1024), "stream_k"),  # 64 blocks
    (Config("stream_k", 64, 64, 64, options=(("share_more", 1),)), (512, 512, 16384), "stream_k"),  # 64 tiles
)
def test_each_rule_drops_its_case(config: Config, size: tuple[int, int, int], rule: str, /) -> None:
    assert rule in reasons(config, Problem(*size), GFX942)


@cases(
    (512, 16, 64, 4, 1, ""),
    (512, 32, 64, 4, 1, "BM 32 > 16 for groups of up to 4 rows"),
    (2048, 32, 64, 4, 1, ""),
    (2048, 32, 64, 8, 1, "8 warps for 32x64, whose weight of four bits they widen"),
    (2**16, 64, 128, 8, 0, "8 warps for 64x128, whose weight of four bits they widen"),
    (2**16, 128, 128, 8, 0, ""),
    (2**16, 256, 128, 8, 0, "BM 256 > 128 for groups of up to 512 rows"),
    (2**16, 64, 128, 4, 1, "swap_ab with BM 64"),
)
def test_tiles_of_four_bits_that_are_widened(rows: int, m: int, n: int, warps: int, swap: int, why: str, /) -> None:
    experts = product("a8w4", rows, 6144, 3072, "fp8e4m3fn fp4e2m1", "mx", groups=Groups(128))
    config = Config("grouped", m, n, 128, 1, 1, warps, 4, options=(("swap_ab", swap),))
    assert reasons(config, experts, SM90).get("widened_tiles", "") == why
    assert "widened_tiles" not in reasons(config, experts, GFX942)
    assert "widened_tiles" not in reasons(config, Problem(rows, 6144, 3072, groups=Groups(128)), SM90)


def tile(m: int, n: int, group: int = 1, split: int = 1, template: str = "tile", **options: int) -> Config:
    return Config(template, m, n, 64, group, split, 8, 4, options=tuple(sorted(options.items())))


def tma(m: int, n: int, stages: int) -> Config:
    return Config("tma", m, n, 64, num_warps=8, num_stages=stages)


def roles(m: int, stages: int, **options: int) -> Config:
    return Config("ws_tma", m, 64, 64, num_warps=m // 16, num_stages=stages, options=tuple(sorted(options.items())))


@cases(
    ("group_m", 256, [tile(128, 128, 2), tile(128, 128, 2, 2), tile(256, 64)], [tile(128, 128), tile(128, 128, 4)]),
    ("group_m", 1000, [tile(128, 128, 4), tile(128, 128, 8)], [tile(128, 128), tile(128, 128, 2)]),
    ("group_m", 4096, [tile(128, 128), tile(128, 128, 4), tile(128, 128, 8)], [tile(128, 128, 2)]),
    ("poll", 16, [tile(16, 64, split=4, poll=1), tile(16, 64, poll=0)], [tile(16, 64, split=4, poll=0)]),
    ("poll", 256, [tile(128, 64, split=4, poll=0), tile(16, 64, split=4)], [tile(128, 64, split=4, poll=1)]),
    (
        "overlap",
        64,
        [tile(64, 64, template="tma", ahead=2, early=1)],
        [tile(32, 128, 2, template="tma", ahead=2, early=1)],
    ),
    ("overlap", 256, [tile(128, 128, template="tma", ahead=1)], [tile(128, 128, template="tma", ahead=1, early=1)]),
    ("overlap", 1024, [tile(128, 128, template="tma")], [tile(128, 128, template="tma", ahead=1)]),
    (
        "overlap",
        64,
        [roles(64, 12, ahead=8), roles(64, 12, ahead=4), roles(64, 8, ahead=4)],
        [roles(64, 12, ahead=2), roles(64, 8, ahead=0), roles(64, 8, ahead=8)],
    ),
    ("alternate", 4096, [tile(128, 128, template="ws_tma", alternate=1)], [roles(128, 4, alternate=1)]),
    ("alternate", 256, [roles(128, 4, alternate=0)], [tile(128, 128, template="ws_tma", alternate=1)]),
    (
        "adjacent",
        256,
        [tile(128, 128, 2, template="ws_tma", adjacent=1), tile(64, 128, 4, template="ws_tma", adjacent=1)],
        [tile(256, 128, template="ws_tma", adjacent=1), tile(128, 128, 1, template="ws_tma", adjacent=1)],
    ),
    ("deep", 256, [tma(128, 128, 7), tma(64, 128, 9), tma(32, 32, 6)], [tma(64, 128, 7), tma(32, 32, 9)]),
)
def test_on_hopper(rule: str, m: int, kept: list[Config], dropped: list[Config], /) -> None:
    problem = Problem(m, 8192, 4096)
    assert [c for c in kept if rule in reasons(c, problem, SM90)] == []
    assert [c for c in dropped if rule not in reasons(c, problem, SM90)] == []


@each(("rows", "kept"), [(100, [0]), (256, [0, 1]), (1000, [0, 1])])
def test_programs_of_groups_are_adjacent_where_these_have_several_rows_of_tiles(rows: int, kept: list[int]) -> None:
    problem = Problem(16 * rows, 2048, 768, groups=Groups(16))
    configs = [tile(128, 128, 2, template="grouped_ws_tma", adjacent=n) for n in (0, 1)]
    rules = tuple(r for r in RULES if r.name == "adjacent")
    assert [c.option("adjacent") for c in prune(configs, problem, SM90, rules).kept] == kept


@each(("m", "ahead"), [(64, 4), (128, 4), (1024, 2), (2048, 0)])
def test_weights_come_ahead_of_a_ring_of_usual_depth_up_to_1024_rows(m: int, ahead: int) -> None:
    problem = Problem(m, 8192, 4096)
    assert [n for n in (0, 2, 4, 8) if "overlap" not in reasons(roles(64, 8, ahead=n), problem, SM90)] == [ahead]


def test_an_early_start_wants_compute_units_that_are_busy() -> None:
    """Two blocks of B come ahead where there is a round of programs at most, one where there are more."""
    for n, blocks in ((3072, []), (7168, [2]), (24576, [1])):
        early = [tile(64, 64, template="tma", ahead=ahead, early=1) for ahead in (0, 1, 2)]
        assert [c.option("ahead") for c in early if "overlap" not in reasons(c, Problem(64, n, 4096), SM90)] == blocks


def test_behind_gate_and_up_configs_with_an_early_start_would_be_equal_kernels() -> None:
    problem = Problem(1, 7168, 4096, *matrices("bf16", layout="TN"), epilogue="silu_mul")
    few = [Config("gemv", 1, 4, 256, options=(("ahead", ahead), ("early", n))) for ahead in (0, 1) for n in (0, 1)]
    several = [tile(64, 64, template="tma", ahead=2, early=1), tile(64, 64, template="tma", ahead=1, early=0)]
    of_64 = replace(problem, m=64)
    assert [c for c in few if "overlap" not in reasons(c, problem, SM90)] == few[::2]
    assert [c for c in several if "overlap" not in reasons(c, of_64, SM90)] == several[1:]


def test_small_tiles_in_parts_rows_of_128_bytes_and_blocks_of_256() -> None:
    problem = product("a8w8_blockscale", 256, 2112, 7168, "fp8e4m3fn")

    def found(m: int, n: int) -> bool:
        config = Config("ws_tma", m, n, 128, num_warps=m // 16, num_stages=4)
        return "scaled" in reasons(config, problem, SM90).get("two_parts", "")

    assert found(64, 192) and not found(128, 192) and not found(128, 128)
    assert not found(64, 96) and not found(128, 160), "padded: all columns at once"
    short, linear = Config("tile", 128, 128, 32, num_warps=8), Problem(4096, 4096, 4096, *matrices(layout="TN"))
    assert reasons(short, linear, SM90)["short_rows"] == "64 B of a row of K < 128 B"
    for problem, other in ((linear, GFX942), (Problem(4096, 4096, 4096), SM90), (replace(linear, k=32), SM90)):
        assert "short_rows" not in reasons(short, problem, other)
    fp8 = replace(linear, a=linear.a._replace(dtype="fp8e4m3fn"), b=linear.b._replace(dtype="fp8e4m3fn"))
    assert "short_rows" not in reasons(replace(short, block_k=64), fp8, SM90)
    long = Config("ws_tma", 64, 64, 256, num_warps=4, num_stages=6)
    linear = Problem(64, 4096, 7168, *matrices(layout="TN"))
    fp8 = replace(linear, a=linear.a._replace(dtype="fp8e4m3fn"), b=linear.b._replace(dtype="fp8e4m3fn"))
    assert "long_blocks" not in reasons(long, fp8, SM90)
    assert "more than 256 rows" in reasons(long, replace(fp8, m=512), SM90)["long_blocks"]
    assert reasons(long, linear, SM90)["long_blocks"] == "512 B along K in a block, more than 256"
    assert "long_blocks" not in reasons(replace(long, block_n=16), replace(linear, m=16), SM90)
    for problem in (linear, replace(linear, m=512)):
        assert "long_blocks" not in reasons(replace(long, block_k=128), problem, SM90)


@each(("m", "kept"), [(16, True), (64, True), (63, True), (512, False)])
def test_operands_are_exchanged_of_as_many_tiles_that_share_blocks_of_b(m: int, kept: bool) -> None:
    config = Config("ws_tma_swapped", 16, 64, 128, num_warps=4, num_stages=10, options=(("swap_ab", 1),))
    assert ("swapped" not in reasons(config, Problem(m, 1280, 8192, *matrices(layout="TN")), SM90)) == kept


def test_skinny_winners_stay() -> None:
    """Shapes and configs that tuning on MI300X is known to pick: more warps than tiles of 16x16, long K blocks."""
    options = (("kpack", 1), ("matrix_instr_nonkdim", 16), ("waves_per_eu", 0))
    assert not reasons(Config("tile", 16, 16, 256, options=options), Problem(2, 3584, 4096), GFX942)
    split = Config("tile", 16, 128, 64, split_k=8, num_warps=8, options=options)
    assert not reasons(split, Problem(2, 3584, 4096), GFX942)


@pytest.mark.parametrize(("name", "size"), [("gfx942", (5120, 4096, 4096)), ("gfx950", (4864, 4096, 4096))])
def test_stream_k_is_tried_first_where_a_round_would_be_nearly_empty(name: str, size: tuple[int, int, int]) -> None:
    target, problem = target_files.load_target(name), Problem(*size)
    kept = prune(space(problem, target), problem, target).kept
    assert rank(kept, problem, target)[0].config.template == "stream_k"
    assert sum(c.template == "stream_k" for c in kept) < len(kept) / 4


@pytest.mark.parametrize("name", ["gfx942", "sm90"])
@pytest.mark.parametrize("size", [(1, 4096, 512), (512, 4096, 14336), (4097, 33, 70)])
def test_a_space_is_pruned_as_its_configs_are_one_by_one(name: str, size: tuple[int, int, int]) -> None:
    target, problem = target_files.load_target(name), Problem(*size)
    entire = space(problem, target)
    thin = tuple(replace(a, values=tuple((n, v[:: 1 + len(v) // 2]) for n, v in a.values)) for a in entire.axes)
    entire = replace(entire, axes=thin)
    assert prune(entire, problem, target) == prune(list(entire), problem, target)


def test_a_rule_is_asked_once_for_all_that_agree_in_what_it_reads(wide: Space) -> None:
    asked: list[tuple[int, int]] = []

    def odd_split(config: Config, problem: Problem, target: target.Target) -> str | None:
        few = config.split_k <= 2
        asked.append((config.split_k, 0 if few else config.option("kpack")))
        return None if few or config.option("kpack") == 1 else f"kpack 2 with split-K {config.split_k}"

    pruned = prune(wide, Problem(64, 64, 64), GFX942, (Rule("odd_split", odd_split),))
    splits = dict(wide.axes[0].values)["split_k"]
    assert sorted(asked) == sorted((s, k) for s in splits for k in ((0,) if s <= 2 else (1, 2)))
    lost = len(wide) // 2 // len(splits) * sum(s > 2 for s in splits)
    assert pruned.removed == {"odd_split": lost} and len(pruned.kept) == len(wide) - lost > 0
    assert not any(c.option("kpack") == 2 and c.split_k > 2 for c in pruned.kept)


def test_a_wide_space_is_pruned_without_making_its_configs(wide: Space, monkeypatch: Patch) -> None:
    made, make = [], TemplateSpace.config

    def note(self: TemplateSpace, point: tuple[int, ...]) -> Config:
        made.append(point)
        return make(self, point)

    monkeypatch.setattr(TemplateSpace, "config", note)
    assert len(prune(wide, Problem(1024, 1024, 1024), GFX942).kept) <= len(made) < len(wide) // 8
    plain = Problem(1024, 1024, 1024, *matrices("bf16", layout="TN"))
    for problem, most in ((plain, 4), (replace(plain, epilogue="silu_mul"), 6)):
        made.clear()
        kept = prune(space(problem, SM90), problem, SM90).kept
        assert len(kept) <= len(made) < most * len(kept), "a rule that need not reads every axis"


def test_neighbours_of_other_blocks_keep_as_many_bytes_under_way() -> None:
    """What is fastest with blocks of half the depth has twice the stages, two steps from here along single axes."""
    entire = space(Problem(64, 4096, 14336), SM90, templates=("tma",))
    here = next(iter(entire.axes)).config((32, 64, 256, 2, 1, 4, 4, 1, 1, 0, 0))
    near = list(entire.neighbours(here))
    assert {replace(here, block_k=128, num_stages=n) for n in (4, 8)} <= set(near)
    assert replace(here, block_n=128, num_stages=2) in near and replace(here, num_stages=5) in near
    assert all(len(set(vars(n).items()) - set(vars(here).items())) <= 2 for n in near)


LINEAR = Problem(64, 512, 1024, *matrices("bf16", layout="TN"))


def templates(limits: SearchLimits, folder: Path, problem: Problem = LINEAR) -> set[str]:
    target = SM90 if problem == LINEAR else GFX942
    return {config.template for config in plan_search(problem, target, folder, "triton", limits).order.configs}


def test_without_a_gpu_kernels_that_only_one_can_check_are_tried_where_nothing_else_is_left(tmp_path: Path) -> None:
    """On Hopper they are predicted to be the fastest, take longest to compile, and none of them could win."""
    few = SearchLimits(axes=(("block_k", (64,)), ("group_m", (8,))))  # which take a fifth of the time
    every, interpreted = templates(few, tmp_path), replace(few, interpreted=True)
    assert {"tile", "tma", "ws_tma", "ws_tma_swapped"} <= every
    assert templates(interpreted, tmp_path) == every - {"ws_tma", "ws_tma_swapped"}
    # The reason is reported.
    assert templates(SearchLimits(templates=("ws_tma",), interpreted=True), tmp_path) == {"ws_tma"}
    problem = replace(LINEAR, m=65)
    assert templates(interpreted, tmp_path, problem) == templates(few, tmp_path, problem)

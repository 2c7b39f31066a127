import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import triton

from tests.support.module_cases import CASES
from tests.support.nouns import Artifact, Config, KernelBackend, Launch, Problem, cases, matrices, registry
from tests.support.products import product
from tests.support.tables import apart, heavy
from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.codegen.template_facts import TEMPLATES, columns_of_slot, exchanges_sums, fault, padded_columns, tail
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.search.pruning.prune import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

SM90 = target_files.load_target("sm90")
WS = Config("ws_tma", 128, 64, 64, 8, num_warps=8, num_stages=4, options=(("epilogue_parts", 2), ("share", 2)))
WS_SPLIT = Config("ws_tma", 64, 32, 64, 1, 3, num_warps=4, num_stages=3)
WS_TWO_PARTS = Config("ws_tma", 128, 288, 64, 1, num_warps=8, num_stages=3, options=(("epilogue_parts", 2),))
SWAPPED = (("epilogue_parts", 4), ("swap_ab", 1))
WS_SWAPPED = Config("ws_tma_swapped", 264, 128, 64, 4, num_warps=8, num_stages=4, options=SWAPPED)
WS_SWAPPED_SPLIT = Config("ws_tma_swapped", 72, 64, 64, 1, 3, num_warps=4, num_stages=3, options=(("swap_ab", 1),))
TMA = Config("tma", 16, 32, 16, 2, 2)
WS_PADDED = Config("ws_tma", 128, 224, 64, 2, num_warps=8, num_stages=4, options=(("epilogue_parts", 4),))
NOT_PADDED = "block_n must be a power of two, the sum of two, or a multiple of 8 up to 256"
OF_EACH_GROUP = "a power of two for each of the 2 groups of 4 warps"

# Few rows compile in a third of the time.
LOW_PADDED = replace(WS_PADDED, block_m=64, block_n=112, num_warps=4)
SWAPPED_PADDED = replace(WS_SWAPPED_SPLIT, num_stages=8)


OTHER_WAY = Problem(1000, 776, 1032, *matrices("bf16", layout="NT"), bias="n")
SIDES_ALONG_K = Problem(1000, 776, 1032, *matrices("bf16", layout="TN"))
LIKE_A_MODELS = Problem(777, 5112, 5112, *matrices("bf16", layout="TN"))  # whose kernels are those of the last


def test_quotients_by_an_inverse_are_exact() -> None:
    """As a kernel computes them, whatever a division of float32 rounds to within two units in the last place."""
    dividend = np.float32(re.findall(r"\((\d+\.0) / ", (TEMPLATES / "kernels" / "_ws_tiles.j2").read_text())[0])
    random = np.random.default_rng(0)
    divisors = np.concatenate([np.arange(1, 4097), random.integers(1, 1 << 31, 4096), 1 << np.arange(31)]).astype(
        np.int64
    )
    for units in (-2, 0, 2):
        exact = dividend / divisors.astype(np.float32)
        inverses = (exact + units * np.spacing(exact)).astype(np.int64)
        assert (inverses < 1 << 32).all() and (inverses >= 0).all()
        most = np.minimum((1 << 18) * divisors, (1 << 31) - 1)
        for numbers in (most, most // divisors * divisors, most // divisors * divisors - 1, random.integers(0, most)):
            quotients = numbers * inverses >> 32
            quotients += numbers - quotients * divisors >= divisors
            assert (quotients == numbers // divisors).all()


@apart(
    (OTHER_WAY, (WS,)),
    heavy(SIDES_ALONG_K, (SWAPPED_PADDED,)),
    heavy(SIDES_ALONG_K, (WS_TWO_PARTS, WS_SWAPPED, WS_PADDED)),
    heavy(OTHER_WAY, (WS_SPLIT, WS_TWO_PARTS, WS_SWAPPED, WS_SWAPPED_SPLIT, WS_PADDED)),
    heavy(SIDES_ALONG_K, (WS, WS_SPLIT, WS_SWAPPED_SPLIT)),
)
def test_roles_compile_without_spills(problem: Problem, configs: tuple[Config, ...], /, session_cache: Path) -> None:
    """One group multiplies in the splits, two in the others; four more warps stand by for the one that fetches."""
    built = compiled(problem, configs, session_cache)
    assert [one.status for one in built] == ["ok"] * len(configs), [one.reason for one in built]
    assert [one.threads for one in built] == [(c.num_warps + 4) * 32 for c in configs]
    assert all(one.spills <= 8 for one in built), "Triton 3.7 spills two registers"


@pytest.mark.heavy
def test_warps_that_widen_a_weight_leave_room_for_wide_tiles(session_cache: Path) -> None:
    wide = Config("ws_fragments", 256, 128, 64, 4, 1, 8, 4, (("epilogue_parts", 2), ("swap_ab", 1)))
    (built,) = compiled(CASES["int4 in fragments"].problem, (wide,), session_cache)
    assert (built.status, built.threads, built.spills) == ("ok", 12 * 32, 0), built.reason


def compiled(problem: Problem, configs: Iterable[Config], folder: Path) -> list[Artifact]:
    compiler = BuildPool(ArtifactCache(folder), jobs=1)
    jobs = [registry.get(KernelBackend, "triton").compile_job(config, problem, SM90) for config in configs]
    try:
        built = {one.config: one for one in compiler.stream(jobs)}
    finally:
        compiler.close()
    return [built[config] for config in configs]


def test_a_launch_has_boxes_for_groups_and_parts_and_room_for_splits(session_cache: Path) -> None:
    entire, split = compiled(OTHER_WAY, (WS, WS_SPLIT), session_cache)
    launch = registry.get(KernelBackend, "triton").launch(entire, OTHER_WAY, SM90)
    assert isinstance(launch, Launch)
    boxes = [p.box for p in launch.params if p.kind == "tma"]
    assert boxes[0] == (64, 64) and boxes[3] == (64, 32), "A by rows of one group, C by half of the columns"
    assert launch.grid == (SM90.compute_units, 1, 1) and SM90.compute_units > 8 * 13
    launch = registry.get(KernelBackend, "triton").launch(split, OTHER_WAY, SM90)
    assert isinstance(launch, Launch) and launch.grid == (3 * 16 * 25, 1, 1)
    assert {b.name: b.bytes for b in launch.buffers} == {
        "workspace": 4 * 64 * 32 * launch.grid[0],
        "semaphore": 4 * launch.grid[0],
    }


TWO_PARTS = (WS_TWO_PARTS, SIDES_ALONG_K, "a 64x64, b 256x64, b 32x64, c 64x64, c 64x32", 8 * 3)
PADDED = (WS_PADDED, SIDES_ALONG_K, "a 64x64, b 224x64, b 256x64, c 64x64, c 64x32", 8 * 4)
SWAPPED_TILE = (WS_SWAPPED, LIKE_A_MODELS, "a 256x64, a 8x64, b 64x64, c 64x64, c 8x64", 3 * 40)


@apart(
    heavy(*TWO_PARTS),
    heavy(*PADDED),
    (LOW_PADDED, SIDES_ALONG_K, "a 64x64, b 112x64, b 128x64, c 64x64, c 64x16", 16 * 7),
    heavy(*SWAPPED_TILE),
    (SWAPPED_PADDED, SIDES_ALONG_K, "a 72x64, a 128x64, b 64x64, c 64x64, c 8x64", 14 * 13 * 3),
    heavy(*(WS_SWAPPED_SPLIT, OTHER_WAY, "a 64x64, a 64x64, b 64x64, c 64x64, c 8x64", 14 * 13 * 3)),
)
def test_a_tile_that_is_no_power_of_two_wide_is_fetched_and_stored_in_blocks_that_are(
    config: Config, problem: Problem, boxes: str, programs: int, /, session_cache: Path
) -> None:
    """Columns of the matrix unit: those of B, or swapped the rows of A."""
    (built,) = compiled(problem, (config,), session_cache)
    launch = registry.get(KernelBackend, "triton").launch(built, problem, SM90)
    assert isinstance(launch, Launch)
    assert ", ".join(f"{p.value} {p.box[0]}x{p.box[1]}" for p in launch.params if p.kind == "tma") == boxes
    assert launch.grid == (programs, 1, 1) and built.shared <= SM90.lds_bytes


def test_swapped_tiles_are_kept_where_they_fill_rounds_better() -> None:
    """777 rows are three tiles of 264, and 3 x 40 of them one round; of even sizes the other template does as well.

    100 rows are in tiles of 104: more in as many tiles would be empty.
    """
    problem = Problem(777, 5120, 5120, *matrices("bf16", layout="TN"))
    kept = prune(space(problem, SM90, templates=("ws_tma_swapped",)), problem, SM90).kept
    assert {c.block_m for c in kept if c.block_n == 128 and c.split_k == 1} >= {264}
    assert all(c.num_warps == {64: 4, 192: 12}.get(c.block_n, 8) for c in kept)
    few = replace(problem, m=100)
    kept = prune(space(few, SM90, templates=("ws_tma_swapped",)), few, SM90).kept
    assert {c.block_m for c in kept} & set(range(64, 129)) == {104}
    even = replace(problem, m=1024, n=4096)
    assert not {264, 272} & {c.block_m for c in prune(space(even, SM90), even, SM90).kept}


@cases(
    (replace(WS_TWO_PARTS, block_n=236), f"{NOT_PADDED}, not 236"),
    (replace(WS_TWO_PARTS, block_n=336), f"{NOT_PADDED}, not 336"),
    (
        replace(WS, options=(("padded", 1),)),
        "nothing reads padded; its options can be"
        " adjacent, ahead, alternate, epilogue_parts, num_stages, num_warps, pair, pairwise, runs, share",
    ),
    (replace(WS_TWO_PARTS, block_m=192), f"block_m must be {OF_EACH_GROUP}, not 192"),
    (replace(TMA, block_n=48), "block_n must be a power of two, not 48"),
    (replace(WS_SWAPPED, block_n=192), f"block_n must be {OF_EACH_GROUP}, not 192"),
    (
        replace(WS_SWAPPED, block_m=236),
        "block_m must be a power of two, the sum of two, or a multiple of 8 up to 256, not 236",
    ),
)
def test_what_no_kernel_can_compute_is_refused(config: Config, complaint: str, /) -> None:
    assert fault(config) == complaint


def test_wider_tiles_of_two_parts_are_kept_where_they_fill_rounds_better() -> None:
    """8 x 32 tiles 192 wide are two rounds of 132, as are 8 x 24 tiles 256 wide; 8 x 48 of 128 are three."""
    problem = Problem(1024, 6144, 4096, *matrices("bf16", layout="TN"))
    kept = prune(space(problem, SM90, templates=("ws_tma",)), problem, SM90).kept
    assert {c.block_n for c in kept if c.block_m == 128 and tail(c.block_n)} == {192}
    square = replace(problem, n=4096)  # one round of 8 x 16 tiles 256 wide
    kept = prune(space(square, SM90, templates=("ws_tma",)), square, SM90).kept
    assert not any(tail(c.block_n) for c in kept if c.block_m == 128 and c.split_k == 1)
    many = replace(problem, m=8192, n=14336)  # 20 rounds of tiles 176 wide, 28 of 128: 0.98 as long
    kept = prune(space(many, SM90, templates=("ws_tma",)), many, SM90).kept
    assert {(c.block_m, c.block_n) for c in kept if tail(c.block_n)} == {(256, n) for n in (160, 168, 176)}


def test_what_the_interpreter_cannot_run_is_not_chosen_without_a_gpu() -> None:
    problem = Problem(64, 64, 64)
    stand_in = OfflineEvaluator(SM90, 5.0)
    try:
        built = [Artifact(c, "0", "ok") for c in (WS, TMA)]
        trials = list(stand_in.screen(problem, built, 0.0))
        (unchecked,) = stand_in.verify(problem, built[:1])
    finally:
        stand_in.close()
    assert [(t.status, bool(t.samples)) for t in trials] == [("pruned", False), ("ok", True)]
    assert unchecked.status == "pruned" and "only a GPU can check a kernel of ws_tma" in unchecked.reason
    assert trials[0].reason == unchecked.reason


@cases(
    (("bf16", "bf16", "bf16"), 4096, True),
    (("fp16", "fp16", "fp32"), 4096, True),
    (("fp8e4m3fn", "fp8e4m3fn", "bf16"), 4096, True),
    (("fp16", "bf16", "fp16"), 4096, False),
    (("int8", "int8", "int32"), 4096, True),
    (("int8", "int8", "int8"), 4096, False),
    (("bf16", "bf16", "bf16"), 4100, False),
)
def test_it_is_for_operands_of_one_type_in_aligned_rows(dtypes: tuple[str, str, str], n: int, there: bool, /) -> None:
    problem = Problem(1024, n, 4096, *matrices(*dtypes, layout="TN"))
    assert ("ws_tma" in {a.template for a in space(problem, SM90).axes}) == there


def scratch_in_loops(built: Artifact) -> list[str]:
    """Instructions that touch scratch memory in the innermost loops that multiply: each iteration would wait for it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    said = subprocess.run([tool, "-c", built.path], check=True, capture_output=True, text=True, encoding="utf-8").stdout
    lines = said.splitlines()
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    # Jumps back without a condition are from waits that are behind everything.
    jumps = [(at, re.search(r"@!?P\d BRA.*`\((\.L_\w+)\)", line)) for at, line in enumerate(lines)]
    loops = [range(labels[to[1]], at) for at, to in jumps if to and labels[to[1]] < at]
    multiply = [loop for loop in loops if any("GMMA" in lines[at] for at in loop)]
    assert multiply, "nvdisasm writes loops in another way"
    innermost = [one for one in multiply if not any(one != other and other[0] in one for other in multiply)]
    return [lines[at] for loop in innermost for at in loop if re.search(r"\b(LDL|STL)\b", lines[at])]


SCALED = Config("ws_tma", 128, 128, 128, 8, num_warps=8, num_stages=4, options=(("share", 2),))
SCALED_SPLIT = Config("ws_tma", 64, 64, 128, 1, 3, num_warps=4, num_stages=8)
SCALED_HIGH = Config("ws_tma", 192, 128, 128, 8, num_warps=12, num_stages=3)
SCALED_PADDED = Config("ws_tma", 128, 160, 128, 8, num_warps=8, num_stages=5, options=(("epilogue_parts", 2),))
SCALED_LOW = replace(SCALED_PADDED, block_m=64, num_warps=4)
SCALED_TWO_PARTS = Config("ws_tma", 128, 192, 128, 8, num_warps=8, num_stages=3, options=(("share", 1),))
SCALED_SWAPPED = Config("ws_tma_swapped", 40, 64, 128, 1, 2, num_warps=4, num_stages=3, options=(("swap_ab", 1),))


@apart(
    heavy("a8w8", "", (SCALED_SPLIT, SCALED_SWAPPED)),
    ("a8w8_blockscale", "block", (SCALED_LOW,)),
    heavy("a8w8_blockscale", "block", (SCALED_PADDED, SCALED_SPLIT, SCALED_SWAPPED)),
    heavy("a8w8", "", (SCALED, SCALED_HIGH, SCALED_TWO_PARTS)),
    heavy("a8w8_blockscale", "block", (SCALED, SCALED_HIGH, SCALED_TWO_PARTS)),
)
def test_scales_of_fp8_compile_without_spills_in_loops(
    family: str, scales: str, configs: tuple[Config, ...], /, session_cache: Path
) -> None:
    """Complete tiles, splits, and columns of two powers of two, whose factors are beside them."""
    problem = product(family, 1000, 768, 1024, "fp8e4m3fn", scales, bias="n")
    triton = registry.get(KernelBackend, "triton")
    assert all(triton.check(c, problem, SM90) for c in configs)
    built = compiled(problem, configs, session_cache)
    # Triton 3.9's assembler may keep a few addresses of the full tile in scratch memory, none that a loop reads.
    assert all(b.status == "ok" and (b.spills == 0 or (b.spills <= 96 and not scratch_in_loops(b))) for b in built)
    astride = triton.check(Config("ws_tma", 128, 176, 128, 8, num_warps=8, num_stages=4), problem, SM90)
    assert bool(astride) == (not scales), "columns are of two scales at most"


@pytest.mark.parametrize("pair", [heavy(0), 1])
def test_groups_with_tiles_of_their_own_compile_alone_or_in_pairs(session_cache: Path, pair: int) -> None:
    problem = Problem(1000, 776, 1032, *matrices("bf16", layout="TN"))
    alone = Config("ws_tma", 128, 128, 64, 4, num_warps=8, num_stages=5, options=(("alternate", 1),))
    config = replace(alone, block_n=64, options=(("alternate", 1), ("pair", 1))) if pair else alone
    triton = registry.get(KernelBackend, "triton")
    (built,) = compiled(problem, (config,), session_cache)
    assert (built.status, built.spills) == ("ok", 0)
    shared = replace(alone, options=(("alternate", 1), ("share", 1)))
    long = product("a8w8", 4096, 4096, 16384, "fp8e4m3fn")
    for config, of in ((shared, problem), (replace(alone, split_k=2), problem), (replace(alone, block_k=128), long)):
        assert "alternate must have 8 warps" in triton.check(config, of, SM90).reason


@pytest.mark.parametrize("m", [64, heavy(1024), 4096])
def test_its_rings_are_as_deep_as_fits(m: int) -> None:
    """Every kept config fits with C's part, none could hold a slot more, and none is both split and shared.

    Of those of 4 warps that are split, two programs may fit on a compute unit instead. More than 8 slots are for few
    rows, whose weights come ahead. Splits that exchange sums need room for those of the others.
    """
    problem = Problem(m, 1280, 8192, *matrices("bf16", layout="TN"))
    kept = [c for c in prune(space(problem, SM90, templates=("ws_tma",)), problem, SM90).kept]
    assert 10 < sum(not c.option("pair") and not c.option("adjacent") for c in kept) < 500
    assert sum(c.option("pair") for c in kept) <= len(kept) / 2, "each may have its pair once"
    for c in kept:
        padded, parts = padded_columns(c), c.option("epilogue_parts")
        slot = 2 * (c.block_m + columns_of_slot(c, problem)) * c.block_k
        body = c.block_n - tail(c.block_n)
        stored = body // parts + (tail(c.block_n) if tail(c.block_n) * parts != body else 0)
        if padded:
            share = c.block_n // (c.split_k if exchanges_sums(c) else 1)
            step, wide = share & -share, min(64, 1 << share.bit_length() - 1)
            stored = wide * -(-(share // wide) // parts) + step * -(-(share % wide // step) // parts)
        sums = 0
        if exchanges_sums(c):
            stored //= 1 if padded else c.split_k
            sums = 4 * c.block_m * c.block_n * (c.split_k - 1) // c.split_k
        room = SM90.lds_bytes - sums - 2 * c.block_m * stored * (1 + c.option("alternate"))
        assert c.num_stages * slot < room, c.name
        halved = room - SM90.lds_bytes // 2 if c.num_warps == 4 and c.split_k > 1 else room
        more = c.num_stages + (1 if c.num_stages < 10 else 2)
        fit = {space for space in (room, halved) if c.num_stages * slot < space < more * slot + 512}
        assert c.num_stages in (8, 16) or fit, c.name
        assert c.option("ahead") in ((4, 8) if c.num_stages > 8 else ({64: 4, 1024: 2}.get(m, 0),)), c.name
        assert m == 64 or c.num_stages <= 8, c.name
        assert c.num_warps == {64: 4, 192: 12}.get(c.block_m, 8) and not (c.split_k > 1 and c.option("share"))

"""The reduction orders that templates state, against sums in Triton's interpreter and against texts of known ones."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.kernel_cases import GFX942, PLAIN, SM90, STREAM, TMA, WS, WS_FRAGMENTS
from tests.support.lent_processes import LentProcess
from tests.support.nouns import Config, Family, Problem, Support, cases, load_target, matrices, registry
from tests.support.summing import DEPTH, RANKS_ROLE, STEP, SumJob
from tritongemm.codegen import modules
from tritongemm.codegen.reduction_orders import reduction_order
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.system.child_process import WorkerProcess

POLL, SWAP = (("poll", 1),), (("swap_ab", 1),)
ONE_A_PROGRAM = (
    Config("tile", 16, 32, 16),
    Config("tile", 32, 16, 64, options=SWAP),
    Config("tma", 16, 32, 32),
    Config("persistent", 16, 32, 64),
)
SPLIT = tuple(
    config
    for split in (3, 8)
    for config in (
        Config("tile", 16, 32, 64, split_k=split),
        Config("tile", 16, 16, 64, split_k=split, options=POLL + SWAP),
        Config("tma", 32, 16, 64, split_k=split),
        Config("tile", 16, 32, 64, options=(("runs", split),)),
        Config("tma", 16, 32, 64, options=(("runs", split), *SWAP)),
    )
)
PAIRS = tuple(
    Config(template, 16, 32, 64, options=(("pairwise", 1), ("runs", 8), *swapped))
    for template, swapped in (("tile", ()), ("tma", SWAP))
)


def test_kernels_of_one_stated_order_sum_alike_and_others_do_not(interpreter: LentProcess, tmp_path: Path) -> None:
    sums = defaultdict[str, set[bytes]](set)
    for m in (1, 20):
        problem = Problem(m, 16, 24 * STEP, *matrices("fp32", layout="TN"))
        text = modules.write_candidates(problem, [*ONE_A_PROGRAM, *SPLIT, *PAIRS], SM90, tmp_path).read_text()
        for config in (*ONE_A_PROGRAM, *SPLIT, *PAIRS):
            order = reduction_order(config, problem, replace(SM90, features=SM90.features - {"wgmma"}))
            (row,) = interpreter.ask(SumJob(problem, config, text), 60)
            sums[str(order)].add(row)
    assert sorted(sums) == ["1x1536", "3x512", "8x192", "8x192 pairwise"]
    assert all(len(found) == 1 for found in sums.values()), "a stated order has several sums"
    assert len(set.union(*sums.values())) == len(sums), "two orders have one sum"


@pytest.mark.heavy
def test_sums_of_one_to_eight_ranks_agree_where_each_adds_up_its_runs_pairwise(tmp_path: Path) -> None:
    child, found = WorkerProcess(RANKS_ROLE, {"TRITON_INTERPRET": "1"}), dict[int, bytes]()
    try:
        for ranks, options in (
            (1, {"pairwise": 1, "runs": 8}),
            (2, {"pairwise": 1, "runs": 4}),
            (4, {"runs": 2}),
            (8, {}),
        ):
            problem = Problem(3, 16, DEPTH // ranks, *matrices("fp32", layout="TN"))
            config = Config("tile", 16, 16, STEP, options=tuple(options.items()))
            text = modules.write_candidates(problem, [config], SM90, tmp_path).read_text()
            (found[ranks],) = child.ask(InterpreterJob(problem, config, text), 60)
    finally:
        child.kill()
    assert len(set(found.values())) == 1


BF16, FP8 = matrices("bf16", layout="TN"), matrices("fp8e4m3fn", "fp8e4m3fn", "bf16", layout="TN")
SIZE = Problem(16, 512, 4096, *BF16)
BLOCKS = registry.get(Family, "a8w8_blockscale").problem(Problem(16, 512, 4096, *FP8))


@cases(
    (replace(PLAIN, block_k=128), SIZE, "1x4096"),
    (replace(WS, options=()), SIZE, "1x4096"),
    (TMA, SIZE, "2x2048"),
    (replace(TMA, split_k=3, block_k=64), SIZE, "3x1408"),
    (Config("ws_tma", 128, 128, 64, 1, 4, 8, 4), SIZE, "4x1024 in tiles of 128 columns"),
    (Config("tile", 64, 64, 64), replace(SIZE, a=FP8[0], b=FP8[1]), "1x4096 by wgmma"),
    (Config("tile", 32, 64, 64), replace(SIZE, a=FP8[0], b=FP8[1]), "1x4096 by mma"),
    (Config("tile", 64, 64, 64), Problem(16, 64, 16384, *FP8), "1x16384 blocks of 64 by wgmma"),
    (Config("tile", 64, 64, 128), BLOCKS, "1x4096 blocks of 128 by wgmma"),
    (Config("ws_tma", 128, 208, 64, 1, 1, 8, 3, (("runs", 4),)), SIZE, "4x1024"),
    (Config("ws_tma_swapped", 32, 128, 64, 1, 1, 8, 4, (("runs", 2), *SWAP)), SIZE, "2x2048"),
    (Config("tile", 64, 64, 64, options=(("pairwise", 1), ("runs", 8))), SIZE, "8x512 pairwise"),
    (Config("ws_tma", 192, 128, 128, 1, 1, 12, 4, (("runs", 2),)), BLOCKS, "2x2048 blocks of 128 by wgmma"),
    (replace(WS_FRAGMENTS, options=SWAP), SIZE, "1x4096"),
    (STREAM, Problem(16, 64, 4096, *matrices("int8", "int8", "int32", layout="TN")), "exact"),
    (Config("gemv", 1, 8, 256), SIZE, "1x4096 by threads 1x8x256 of 4 warps"),
)
def test_stated_orders(config: Config, problem: Problem, order: str, /) -> None:
    assert str(reduction_order(config, problem, SM90)) == order


@cases(
    STREAM,
    WS,  # tiles shared by programs
    Config("ws_tma", 64, 64, 64, 1, 3, 4, 3),  # 64 blocks of K
    Config("ws_tma_swapped", 32, 128, 64, 1, 4, 8, 4, SWAP),  # exchanged sums of rows
)
def test_orders_that_depend_on_m_or_on_a_place_are_not_stated(config: Config, /) -> None:
    assert isinstance(reduction_order(config, SIZE, SM90), Support)


def test_instructions_of_another_shape_or_packing_are_another_order() -> None:
    options = ({"matrix_instr_nonkdim": side, "kpack": pack} for side in (16, 32) for pack in (1, 2))
    configs = [Config("tile", 64, 64, 64, options=tuple(one.items())) for one in options]
    assert len({str(reduction_order(config, SIZE, GFX942)) for config in configs}) == 4
    gfx1250, of_fp8 = load_target("gfx1250"), replace(SIZE, a=FP8[0], b=FP8[1])
    deep = [
        [str(reduction_order(Config("tile", 64, 64, k), p, gfx1250)) for k in (32, 64, 256)] for p in (SIZE, of_fp8)
    ]
    assert deep == [["1x4096"] * 3, ["1x4096 by wmma k64"] * 2 + ["1x4096 by wmma k128"]]

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import GFX942, SM90
from tests.support.nouns import Config, Family, Groups, Operand, Problem, apart, heavy, matrices, registry
from tritongemm.codegen import modules
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.system.child_process import WorkerProcess

PLAIN = Config("grouped", 16, 32, 32, 4, options=(("per_unit", 2),))
FEW = Config("grouped", 16, 16, 16, options=(("swap_ab", 1), ("xcds", 8)))
DESCRIBED = Config("grouped_tma", 16, 32, 16, 2, options=(("per_unit", 1),))
DESCRIBED_FEW = Config("grouped_tma", 16, 16, 32, options=(("swap_ab", 1),))
SERVED = Config("grouped_tile", 16, 64, 32, 2)  # on sm90 swapped where its operands are fp8
ROW = Config("grouped_gemv", 1, 16, 128)
GATED_ROW = Config("grouped_gemv", 1, 16, 128)
COUNTS = (7, 0, 33, 1, 0)
WIDE = Config("grouped", 16, 256, 128)
BLOCKS = (WIDE, Config("grouped", 32, 64, 64, options=(("swap_ab", 1),)), Config("grouped_tma", 16, 64, 128),
          Config("grouped_tma", 16, 256, 128, options=(("swap_ab", 1),)), SERVED,
          Config("grouped_tile", 64, 32, 128, 16))  # fmt: skip


def grouped(
    family: str, n: int, k: int, dtype: str, dtype_c: str, room: int = 0, row_major_b: bool = False, scales: str = ""
) -> Problem:
    made: Problem = registry.get(Family, family).problem(
        Problem(
            sum(COUNTS),
            n,
            k,
            *matrices(dtype, c=dtype_c, layout="T" + "NT"[row_major_b]),
            groups=Groups(len(COUNTS), room=room, spread="captured", counts=COUNTS),
        ),
        scales,
    )
    return made


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize("row_major_b", [False, True])
def test_uneven_groups_at_odd_sizes(interpreted: Interpreted, room: int, row_major_b: bool) -> None:
    problem = grouped("dense", 40, 48 if row_major_b else 40, "fp16", "fp16", room, row_major_b=row_major_b)
    described = [DESCRIBED] if row_major_b else [DESCRIBED, DESCRIBED_FEW]
    interpreted.check(problem, [PLAIN, FEW, SERVED, ROW, *described], SM90)


@pytest.mark.parametrize("counts", [COUNTS, heavy((0, sum(COUNTS), 0, 0, 0))])
def test_gate_and_up(interpreted: Interpreted, counts: tuple[int, ...]) -> None:
    """Columns of up are behind all of gate's, and a tile has some of both; of blocks each with their own factors."""
    groups = Groups(len(counts), spread="captured", counts=counts)
    plain = replace(grouped("dense", 44, 40, "bf16", "bf16"), groups=groups, epilogue="silu_mul")
    interpreted.check(plain, [PLAIN, FEW, SERVED, GATED_ROW], SM90)
    scaled = replace(grouped("a8w8_blockscale", 384, 128, "fp8e4m3fn", "bf16"), groups=groups, epilogue="silu_mul")
    interpreted.check(scaled, [Config("grouped", 16, 128, 128), Config("grouped_gemv", 1, 128, 128)], SM90)
    in_blocks = replace(scaled, n=512, epilogue="silu_mul_block", c=Operand("fp8e4m3fn"))
    interpreted.check(in_blocks, [replace(WIDE, options=(("swap_ab", 1),))], SM90)


@pytest.mark.parametrize("room", [0, 36])
def test_scales_of_rows(interpreted: Interpreted, room: int) -> None:
    interpreted.check(grouped("a8w8", 21, 37, "fp8e4m3fnuz", "bf16", room), [PLAIN, FEW, SERVED, ROW], GFX942)


@pytest.mark.parametrize("room", [0, 36])
@pytest.mark.parametrize("family", ["dense", "a8w8", "a8w8_blockscale"])
def test_integers_are_exact(interpreter: WorkerProcess, tmp_path: Path, family: str, room: int) -> None:
    """Sums in int32 to the last bit; with scales, what float32 rounds of the exact sum times its factors."""
    problem = grouped(family, 21, 160, "int8", "int32" if family == "dense" else "fp32", room)
    configs = [PLAIN, FEW, SERVED] if family != "a8w8_blockscale" else [Config("grouped", 16, 32, 128), BLOCKS[1]]
    configs.append(ROW)
    text = modules.write_candidates(problem, configs, GFX942, tmp_path).read_text()
    for config in configs:
        ((error, tolerance),) = interpreter.ask(InterpreterJob(problem, config, text), 60)
        assert error <= (0 if family == "dense" else 1e-6) <= tolerance, config.name


@apart(heavy("block", 0), ("block", 36), heavy("block_rows", 36), heavy("group", 0))
def test_scales_of_blocks(scales: str, room: int, /, interpreted: Interpreted) -> None:
    problem = grouped("a8w8_blockscale", 144, 256, "fp8e4m3fn", "bf16", room, scales=scales)
    interpreted.check(problem, [*BLOCKS, Config("grouped_gemv", 1, 16, 256)], SM90)

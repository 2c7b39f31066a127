"""What is measured of a kernel's main loop: of written assembly, and of kernels compiled for every kind of target."""

from typing import Any

import pytest

from tritongemm.core.artifact import Artifact, LoopFacts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.formats import Defaults, make_problem
from tritongemm.hip_ext.binaries.kernel_loops import measure
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import KernelBackend
from tritongemm.search.cost_model import model
from tritongemm.search_spaces.loader import load_target

TRITON = registry.get(KernelBackend, "triton")
WIDE, BYTE, MATRIX = (
    "buffer_load_dwordx4 v1, s[0:3], 0 offen lds",
    "buffer_load_ubyte v1, v2, s[0:3]",
    "v_mfma_f32_x a, v",
)


def loop(*steps: str, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> LoopFacts | None:
    body = (*before, ".LBB0_1:", *steps, "s_cbranch_scc1 .LBB0_1", *after, "s_endpgm")
    return measure("\n".join(step if step.endswith(":") else f"\t{step}    ; comment" for step in body))


def wait(left: int) -> str:
    return f"s_waitcnt vmcnt({left}) lgkmcnt(0)"


@pytest.mark.parametrize(
    ("steps", "drains", "ahead"),
    [
        ((wait(0), WIDE, WIDE, MATRIX), 1, 0.6),
        ((wait(2), WIDE, WIDE, MATRIX), 0, 1.6),  # of three blocks, the last is left under way
        ((wait(0), WIDE, WIDE, BYTE, MATRIX), 1, 0.5),  # what was loaded last empties the pipeline
        ((wait(2), BYTE, WIDE, WIDE, MATRIX), 0, 0.83),  # what is loaded first does not
        ((wait(3), "buffer_store_dword v1, v2, s[0:3]", WIDE, WIDE, MATRIX), 0, 1.5),  # stores count
        ((WIDE, "s_waitcnt lgkmcnt(0)", MATRIX), 0, None),
        (("s_wait_loadcnt 0x0", "buffer_load_b128 v[0:3]", "v_wmma_f32_x v[0:7]"), 1, 0.75),
        (("s_wait_asynccnt 0x1", "global_load_async_to_lds_b128 v1", "buffer_load_b32 v", MATRIX), 0, 1.8),
    ],
)
def test_waits_are_followed_over_iterations(steps: tuple[str, ...], drains: int, ahead: float | None) -> None:
    found = loop(*steps)
    assert found and found.ahead == (None if ahead is None else pytest.approx(ahead, abs=0.01))
    assert (found.drains, found.instructions, found.matrix) == (drains, len(steps) + 1, 1)


def test_loads_and_spilled_registers_are_counted_by_their_bytes() -> None:
    spills = "scratch_store_dwordx2 off, v[1:2], s32", "scratch_load_dword v1, off, s32"
    found = loop(WIDE, BYTE, "global_load_short_d16 v1, v2", *spills, MATRIX)
    assert found and (found.loads, found.narrow, found.spilled) == (3, 2, 12)
    assert (
        found.describe() == "7.0 instructions a matrix instruction; 2 of 3 loads of less than 4 bytes; spills 12 bytes"
    )
    assert loop("v_add_u32 v1, v1, v2") is None


def test_the_main_loop_is_an_inner_one_that_is_a_loop() -> None:
    """A jump backwards that is not reached again closes none; a wait that spins is part of its loop."""
    outer = (".LBB0_9:", MATRIX, MATRIX, MATRIX)
    found = loop(WIDE, MATRIX, ".LBB0_5:", "s_cbranch_vccz .LBB0_5", before=outer, after=("s_cbranch_scc0 .LBB0_9",))
    assert found and (found.instructions, found.matrix) == (4, 1)
    found = loop(
        WIDE,
        before=("s_branch .LBB0_3", ".LBB0_2:", *[MATRIX] * 4, "s_endpgm", ".LBB0_3:"),
        after=("s_branch .LBB0_2",),
    )
    assert found and (found.loads, found.matrix) == (1, 0)


@pytest.mark.parametrize(
    ("arch", "config", "counted"),
    [
        pytest.param("gfx90a", Config("tile", 64, 64, 64, num_warps=4), True, marks=pytest.mark.heavy),
        ("gfx942", Config("tile", 64, 64, 64, num_warps=4), True),
        ("gfx950", Config("tile", 64, 64, 64, num_warps=4, num_stages=3), True),
        pytest.param("gfx1100", Config("tile", 64, 64, 32, num_warps=4), True, marks=pytest.mark.heavy),
        pytest.param("sm80", Config("tile", 64, 64, 64, num_warps=4, num_stages=3), True, marks=pytest.mark.heavy),
        ("sm90", Config("tma", 64, 64, 64, num_warps=4, num_stages=3), False),
        ("sm100", Config("tma", 128, 64, 64, num_warps=4, num_stages=3), False),
    ],
    ids=str,
)
def test_every_kind_of_target_is_measured(arch: str, config: Config, counted: bool) -> None:
    """Others are compiled in search_spaces/test_targets_compile.py. No wait counts loads of NVIDIA's copy engine."""
    built = compiled(arch, config, "bf16", 64, 64)
    assert built.loop and 2 <= built.loop.instructions / built.loop.matrix < 60
    assert built.loop.loads >= 2 and built.loop.narrow == 0 and not built.loop.spilled
    assert (built.loop.ahead is not None) is counted
    assert Artifact.from_json(built.to_json()) == built


def problem_of(dtype: str, m: int, n: int, **given: Any) -> Problem:
    types = {"dtype_a": dtype, "dtype_b": dtype, "dtype_c": "bf16"}
    return make_problem(Defaults(), m, n, 4096, {**types, "row_major_b": False, **given})


def compiled(arch: str, config: Config, dtype: str, m: int, n: int, **given: Any) -> Artifact:
    target, problem = load_target(arch), problem_of(dtype, m, n, **given)
    built, _, _ = TRITON.compile(TRITON.compile_job(config, problem, target))
    assert built.status == "ok", built.reason
    return built


OPTIONS = (("kpack", 1), ("matrix_instr_nonkdim", 16))


@pytest.mark.heavy
def test_factors_are_loaded_in_words_ahead_of_their_sums() -> None:
    """On gfx950: shuffled powers of two and those in rows some at a time; those of fp8 blocks before the blocks."""
    for scales in ("mx_shuffled", "mx"):
        config = Config("tile", 64, 64, 512, num_warps=4, num_stages=3, options=OPTIONS)
        found = compiled("gfx950", config, "fp4e2m1", 256, 4096, family="a4w4_blockscale", scales=scales).loop
        assert found and (found.narrow, found.drains) == (0, 0) and (found.ahead or 0) > 1 and found.instructions < 150
    config = Config("tile", 64, 32, 128, num_warps=2, num_stages=3, split_k=4, options=OPTIONS)
    found = compiled("gfx950", config, "fp8e4m3fn", 64, 4096, family="a8w8_blockscale", scales="block").loop
    assert found and found.drains == 0 and (found.ahead or 0) > 0.7


@pytest.mark.heavy
def test_a_loop_that_spills_is_predicted_by_what_it_spills() -> None:
    """256 x 256 x 64 numbers for gfx942, in four warps or in eight whose operands are read by eights."""
    target, problem = load_target("gfx942"), problem_of("bf16", 4096, 4096)
    config = Config("tile", 256, 256, 64, num_warps=8, options=(("kpack", 2), ("matrix_instr_nonkdim", 16)))
    built = compiled("gfx942", config, "bf16", 4096, 4096)
    assert built.loop and built.loop.spilled
    other = Config("tile", 256, 256, 64, num_warps=8, options=OPTIONS)
    steady = compiled("gfx942", other, "bf16", 4096, 4096)
    assert steady.loop and steady.loop.spilled == 0
    slow, fast = (model.predict(a.config, problem, target, a).seconds for a in (built, steady))
    assert slow > 1.2 * fast

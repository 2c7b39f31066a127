"""Products with a power of two for each 32 numbers along K (OCP MX): fp4 and fp8, their scales in rows or shuffled, one
at a time, in batches and in groups."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import emulated
from tests.support.covering import pairwise
from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import MX_BATCHED, MX_GEMV, MX_GROUPED, UNEVEN
from tests.support.nouns import Config, Family, Groups, KernelBackend, Patch, Problem, load_target, matrices, registry
from tests.support.refusals import fails, refuses
from tests.support.tables import apart
from tritongemm.codegen import render
from tritongemm.measure.interpreting import mend_interpreter
from tritongemm.search.cost_model import model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

TRITON = registry.get(KernelBackend, "triton")
FP4, E4M3, E5M2 = "fp4e2m1", "fp8e4m3fn", "fp8e5m2"
FORMS = ((FP4, ""), (FP4, "mx"), (E4M3, "mx"), (E5M2, "mx_shuffled"))
CONFIGS = (
    Config("tile", 16, 32, 128, split_k=2),
    Config("tile", 32, 16, 256, options=(("swap_ab", 1),)),
    Config("stream_k", 16, 16, 128, 2, options=(("num_sms", 5),)),
    Config("tma", 16, 64, 128, 2, 2, options=(("swap_ab", 1),)),
    Config("persistent", 16, 32, 128, 2, options=(("epilogue_parts", 2),)),
    Config("stream_k_tma", 16, 16, 128, 2, options=(("share_more", 1),)),
)
GFX950 = load_target("gfx950")


def of(dtype: str, scales: str, m: int = 17, n: int = 48, k: int = 352, c: str = "bf16", **more: Any) -> Problem:
    shared = more.pop("shared", "")
    family: Family = registry.get(Family, "a4w4_blockscale" if dtype == FP4 else "a8w8_blockscale")
    return family.problem(Problem(m, n, k, *matrices(dtype, c=c, layout="TN", shared=shared), **more), scales)


def uneven(dtype: str, scales: str, room: int = 0, n: int = 45, k: int = 330) -> Problem:
    """Groups of uneven M, two of them empty, whose rows begin within a block of shuffled scales."""
    return of(dtype, scales, sum(UNEVEN), n, k, "bf16", groups=Groups(len(UNEVEN), room, "captured", UNEVEN))


def _interpreted() -> bool:
    from triton.runtime.interpreter import InterpreterBuilder

    return hasattr(InterpreterBuilder, "create_dot_scaled")


def test_an_interpreter_without_such_products_says_so(monkeypatch: Patch) -> None:
    """That of Triton 3.6, whose own error was of a text without a value."""
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_dot_scaled", raising=False)
    for name in ("_patch_lang_tensor", "_patch_lang_core"):
        monkeypatch.setattr(interpreter, name, lambda *_: None)
    mend_interpreter.__wrapped__()
    language = SimpleNamespace(dtype=SimpleNamespace(to_ir=None))
    interpreter._patch_lang_core(language, SimpleNamespace(set_attr=setattr))
    fails(RuntimeError, "can't multiply by powers of two", language.dot_scaled)


@pytest.mark.skipif(not _interpreted(), reason="this Triton's interpreter has no dot_scaled")
@apart(
    ("sm100", *FORMS[0]),
    pytest.param("sm100", *FORMS[1], marks=pytest.mark.heavy),
    pytest.param("sm100", *FORMS[2], marks=pytest.mark.heavy),
    pytest.param("sm100", *FORMS[3], marks=pytest.mark.heavy),
    ("sm90", FP4, "mx"),
    ids=str,
)
def test_kernels_apply_powers_of_two(arch: str, dtype: str, scales: str, /, interpreted: Interpreted) -> None:
    problem = of(dtype, scales)
    target = load_target(arch)
    assert all(TRITON.check(c, problem, target) for c in CONFIGS)
    interpreted.check(problem, CONFIGS, target)


@pytest.mark.skipif(not _interpreted(), reason="this Triton's interpreter has no dot_scaled")
def test_complete_blocks_of_factors_are_loaded_as_they_are_stored(interpreted: Interpreted) -> None:
    """K has part of a block, M and N part of a tile; a tile of 16 rows has no complete block of A's factors."""
    configs = Config("tile", 64, 32, 256, split_k=2), Config("tile", 16, 32, 512, options=(("swap_ab", 1),))
    interpreted.check(of(FP4, "mx_shuffled", 70, 37, 800), configs, GFX950)
    interpreted.check(of(FP4, "mx_shuffled", 33, 37, 512), configs[:1], GFX950)


@apart(*[form if form in FORMS[::2] else pytest.param(*form, marks=pytest.mark.heavy) for form in FORMS])
def test_gemv_multiplies_numbers_by_their_powers(dtype: str, scales: str, /, interpreted: Interpreted) -> None:
    """No matrix unit applies them there; K has part of a group and N part of a tile."""
    interpreted.check(of(dtype, scales, 3, 13, 202), MX_GEMV, GFX950)


@pytest.mark.skipif(not _interpreted(), reason="this Triton's interpreter has no dot_scaled")
@apart(
    (*FORMS[1], "b"),
    (*FORMS[2], "a"),
    *(pytest.param(*FORMS[i], "", marks=pytest.mark.heavy) for i in (0, 3)),  # a kernel of groups has these
)
def test_products_of_a_batch_have_own_powers(dtype: str, scales: str, shared: str, /, interpreted: Interpreted) -> None:
    problem = of(dtype, scales, 5, 21, 160, batch=2, shared=shared)
    target, family = load_target("sm100"), registry.get(Family, problem.family)
    assert family.supports(problem, target)
    configs = [c for c in MX_BATCHED if TRITON.check(c, problem, target)]
    assert {c.template for c in configs} == {"tile", "gemv", "tma"}
    interpreted.check(problem, configs, target)


@pytest.mark.skipif(not _interpreted(), reason="this Triton's interpreter has no dot_scaled")
@apart(
    (*FORMS[0], 36),
    (*FORMS[3], 0),
    *(pytest.param(*FORMS[i], room, marks=pytest.mark.heavy) for i, room in ((1, 0), (2, 36))),
)
def test_each_group_has_its_own_powers(dtype: str, scales: str, room: int, /, interpreted: Interpreted) -> None:
    problem, target = uneven(dtype, scales, room, n=21, k=160), load_target("sm100")
    assert registry.get(Family, problem.family).supports(problem, target)
    configs = [c for c in MX_GROUPED if TRITON.check(c, problem, target)]
    assert {c.template for c in configs} == {"grouped", "grouped_tile", "grouped_tma"}
    interpreted.check(problem, configs, target)


ARCHS = ("gfx942", "gfx950", "sm90", "sm100")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m", [1, 4096])
def test_there_are_candidates(arch: str, m: int) -> None:
    target = load_target(arch)
    problems = [of(dtype, scales, m, 2112, 7168) for dtype, scales in FORMS]
    assert all(registry.get(Family, p.family).supports(p, target) and TRITON.supports(p, target) for p in problems)
    problem = problems[(ARCHS.index(arch) + (m > 1)) % len(FORMS)]
    kept = prune.prune(space(problem, target), problem, target)
    assert kept.kept and not kept.skipped
    assert {c.block_k for c in kept.kept if c.template != "gemv"} <= {128, 256, 512}
    assert ("gemv" in {c.template for c in kept.kept}) == (m == 1)
    ranked = model.rank(kept.kept, problem, target).configs
    assert all(TRITON.check(c, problem, target) for c in ranked[:: len(ranked) // 20 + 1])


def test_half_the_bytes_take_less_time_and_what_is_refused() -> None:
    config = Config("tile", 16, 128, 256)
    fp8, fp4 = (model.predict(config, of(d, "mx", 16, 8192, 8192), GFX950).seconds for d in (E4M3, FP4))
    assert fp4 < 0.9 * fp8
    refuses(r"'mx' .* it has block, block_rows", of, "fp8e4m3fnuz", "mx")
    refuses("'mx'", of, "int8", "mx")
    gfx90a = load_target("gfx90a")
    assert "no matrix instruction" in registry.get(Family, "a4w4_blockscale").supports(of(FP4, ""), gfx90a).reason
    one = of(E4M3, "mx")
    assert "column-major" in registry.get(Family, "a8w8_blockscale").supports(one.stored(True, True), GFX950).reason
    shuffled = replace(one, batch=3, b=one.b._replace(order="shuffled_16x16"))
    assert "are in rows or columns" in registry.get(Family, "a8w8_blockscale").supports(shuffled, GFX950).reason
    assert "block_k must be a multiple of 128" in TRITON.check(Config("tile", 16, 32, 64), of(FP4, ""), GFX950).reason
    reason = TRITON.check(Config("gemv", 1, 8, 16), of(FP4, ""), GFX950).reason
    assert "block_k must be a multiple of the 32 elements of one scale" in reason
    sm90 = load_target("sm90")
    assert "does not run template grouped_ws_tma" in TRITON.check(Config("grouped_ws_tma", 64, 32, 128, num_warps=4),
        uneven(E4M3, "mx"), sm90).reason  # fmt: skip


MANY = ({"batch": 4}, {"groups": Groups(8)}, {"groups": Groups(8, 64)})


@pytest.mark.parametrize(
    ("arch", "form", "more"),
    [
        pytest.param(*case, marks=() if i % 3 == 0 else pytest.mark.heavy)
        for i, case in enumerate(pairwise(["gfx942", "gfx950", "sm90", "sm100"], FORMS, MANY))
    ],
    ids=str,
)
def test_there_are_candidates_of_batches_and_groups(arch: str, form: tuple[str, str], more: dict[str, Any]) -> None:
    target = load_target(arch)
    problem = of(*form, 64, 2112, 7168, **more)
    assert registry.get(Family, problem.family).supports(problem, target) and TRITON.candidates(problem, target)


ON_HOPPER = [*((c, {}) for c in CONFIGS), (MX_BATCHED[0], {"batch": 2}),
    *((c, {"groups": Groups(8, 64)}) for c in MX_GROUPED)]  # fmt: skip
QUICK = (CONFIGS[1], MX_GROUPED[0])


@apart(*[pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.heavy) for case in ON_HOPPER], ids=str)
def test_numbers_that_share_bytes_are_taken_apart_on_hopper(config: Config, more: dict[str, Any], /) -> None:
    """By the target's assembly, into two products of half the depth."""
    problem, target = of(FP4, "mx", 64, 96, 352, **more), load_target("sm90")
    text = render.kernel_alone(problem, config.template, target)
    assert text.count("inline_asm_elementwise(UNPACK") == 2 * text.count("a_low, a_high = ") > 0
    built, _, _ = TRITON.compile(TRITON.compile_job(config, problem, target))
    assert built.status == "ok", built.reason


EMULATED = {
    "gfx942": (
        Config("tile", 32, 32, 128, 2, 2, 2, options=(("matrix_instr_nonkdim", 16),)),
        Config("tile", 32, 64, 128, options=(("matrix_instr_nonkdim", 32), ("swap_ab", 1))),
    ),
    "gfx950": (
        Config("tile", 32, 32, 128, 2, 2, 2, options=(("matrix_instr_nonkdim", 16),)),
        Config("tile", 64, 64, 256, num_warps=4, options=(("matrix_instr_nonkdim", 32),)),
        Config("stream_k", 32, 32, 128, 2, options=(("matrix_instr_nonkdim", 16), ("num_sms", 3))),
    ),
}


@pytest.mark.emulator
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
def test_amd_kernels_run_in_an_emulator(tmp_path: Path, arch: str, dtype: str, scales: str) -> None:
    emulated.run_configs(tmp_path, of(dtype, scales, 37, 45, 330), EMULATED[arch], load_target(arch))


IN_GEMV = (Config("gemv", 1, 8, 256, num_stages=1), Config("gemv", 4, 16, 256, split_k=2, num_stages=1))
IN_BATCHES = (replace(EMULATED["gfx942"][0], block_k=256), Config("gemv", 2, 8, 256, split_k=2, num_stages=1))
IN_GROUPS = (
    Config("grouped", 16, 32, 256, 4, num_warps=2, options=(("matrix_instr_nonkdim", 16), ("per_unit", 1))),
    Config("grouped_tile", 32, 32, 128, 4, options=(("matrix_instr_nonkdim", 16),)),
)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
@pytest.mark.parametrize("kind", ["gemv", "batch", "shared", "groups", "masked"])
def test_amd_gemv_batches_and_groups_emulated(tmp_path: Path, arch: str, dtype: str, scales: str, kind: str) -> None:
    if kind in ("groups", "masked"):
        problem, configs = uneven(dtype, scales, 36 if kind == "masked" else 0), IN_GROUPS
    elif kind == "gemv":
        problem, configs = of(dtype, scales, 3, 45, 330), IN_GEMV
    else:
        problem, configs = of(dtype, scales, 5, 45, 330, batch=3, shared="b" if kind == "shared" else ""), IN_BATCHES
    emulated.run_configs(tmp_path, problem, configs, load_target(arch))

"""Products with a power of two for each 32 numbers along K (OCP MX): fp4 and fp8, their scales in rows or shuffled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import emulated
from tritongemm.codegen import modules
from tritongemm.core import settings
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.export import launch_plans
from tritongemm.measure.offline_evaluator import InterpreterJob
from tritongemm.numerics.error_metric import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, KernelBackend
from tritongemm.search.cost_model import model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files
from tritongemm.workers.child_process import WorkerProcess

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
GFX950 = target_files.load_target("gfx950")


def of(dtype: str, scales: str, m: int = 17, n: int = 48, k: int = 336, c: str = "bf16") -> Problem:
    family = registry.get(Family, "a4w4_blockscale" if dtype == FP4 else "a8w8_blockscale")
    return family.problem(m, n, k, dtype, dtype, c, row_major_b=False, scales=scales)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WorkerProcess]:
    child = WorkerProcess("tritongemm.measure.offline_evaluator:Interpreter", {"TRITON_INTERPRET": "1"})
    yield child
    child.kill()


def _interpreted() -> bool:
    from triton.runtime.interpreter import InterpreterBuilder

    return hasattr(InterpreterBuilder, "create_dot_scaled")


@pytest.mark.skipif(not _interpreted(), reason="this Triton's interpreter has no dot_scaled")
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
def test_kernels_apply_powers_of_two(interpreter: WorkerProcess, tmp_path: Path, dtype: str, scales: str) -> None:
    """By the generated module's own inputs and reference, and by the family's."""
    problem = of(dtype, scales)
    target = target_files.load_target("sm100")
    configs = [c for c in CONFIGS if TRITON.check(c, problem, target)]
    assert len(configs) == (3 if dtype == FP4 else len(CONFIGS))
    text = modules.write_candidates(problem, configs, target, tmp_path).read_text()
    for config in configs:
        ((error, _),) = interpreter.ask(InterpreterJob(problem, config, text), 60)
        assert error < 1e-3, config.name


@pytest.mark.parametrize(("dtype", "scales"), FORMS)
def test_a_scale_in_another_place_fails(dtype: str, scales: str) -> None:
    problem = of(dtype, scales)
    family = registry.get(Family, problem.family)
    operands = family.make_inputs(problem, "cpu")
    exact, tolerance = family.reference(problem, operands), family.tolerance(problem)
    assert 0.05 < float(exact.square().mean().sqrt()) < 20
    assert deviation(exact.bfloat16(), exact) < tolerance
    for name in ("scale_a", "scale_b"):
        factors = operands[name]
        assert factors.dtype == torch.uint8 and factors.max() - factors.min() == 20
        for axis in (0, 1):
            moved = operands | {name: factors.roll(1, axis)}
            assert deviation(family.reference(problem, moved), exact) > 10 * tolerance
    nan = operands | {"scale_a": torch.full_like(operands["scale_a"], 255)}
    assert family.reference(problem, nan).isnan().all()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm90", "sm100"])
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
@pytest.mark.parametrize("m", [1, 4096])
def test_there_are_candidates(arch: str, dtype: str, scales: str, m: int) -> None:
    target = target_files.load_target(arch)
    problem = of(dtype, scales, m, 2112, 7168)
    assert registry.get(Family, problem.family).supports(problem, target)
    assert TRITON.supports(problem, target)
    kept = prune.prune(space(problem, target), problem, target)
    assert kept.kept and not kept.skipped
    assert {c.block_k for c in kept.kept} <= {128, 256, 512}
    ranked = model.rank(kept.kept, problem, target).configs
    assert all(TRITON.check(c, problem, target) for c in ranked[:: len(ranked) // 20 + 1])


def test_half_the_bytes_take_less_time() -> None:
    config = Config("tile", 16, 128, 256)
    fp8, fp4 = (model.predict(config, of(d, "mx", 16, 8192, 8192), GFX950).seconds for d in (E4M3, FP4))
    assert fp4 < 0.9 * fp8


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"'mx' .* it has block, block_rows"):
        of("fp8e4m3fnuz", "mx")
    with pytest.raises(InputError, match="'mx'"):
        of("int8", "mx")
    gfx90a = target_files.load_target("gfx90a")
    assert "no matrix instruction" in registry.get(Family, "a4w4_blockscale").supports(of(FP4, ""), gfx90a).reason
    turned = replace(of(E4M3, "mx"), row_major_b=True)
    assert "column-major" in registry.get(Family, "a8w8_blockscale").supports(turned, GFX950).reason
    batch = replace(of(E4M3, "mx"), batch=3)
    assert "not for a batch" in registry.get(Family, "a8w8_blockscale").supports(batch, GFX950).reason
    small = Config("tile", 16, 32, 64)
    assert "block_k must be a multiple of 128" in TRITON.check(small, of(FP4, ""), GFX950).reason
    assert not TRITON.check(Config("gemv", 1, 8, 256), of(FP4, ""), GFX950)
    assert "scales of a whole operand or of powers" in registry.get(Family, "a8w8_blockscale").supports(
        replace(of(E4M3, "mx"), groups=4), GFX950
    ).reason  # fmt: skip


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


@pytest.mark.skipif(settings.emulator_checkout() is None, reason="some seconds each: TRITONGEMM_EMULATOR_CHECKOUT")
@pytest.mark.parametrize("arch", EMULATED)
@pytest.mark.parametrize(("dtype", "scales"), FORMS)
def test_amd_kernels_run_in_an_emulator(tmp_path: Path, arch: str, dtype: str, scales: str) -> None:
    """Odd sizes, factors over 2**20, memory operations landing as late as the code allows."""
    target, plans = target_files.load_target(arch), []
    problem = of(dtype, scales, 37, 45, 330)
    for i, config in enumerate(EMULATED[arch]):
        assert TRITON.check(config, problem, target), config.name
        built, code, _ = TRITON.compile(TRITON.compile_job(config, problem, target))
        assert built.status == "ok" and not built.spills, config.name
        (tmp_path / f"{i}.hsaco").write_bytes(code)
        launch = TRITON.launch(replace(built, path=str(tmp_path / f"{i}.hsaco")), problem, target)
        assert isinstance(launch, Launch)
        plans.append(tmp_path / f"{i}.json")
        plans[-1].write_text(json.dumps({**launch_plans.plan(launch, problem, target), "object": f"{i}.hsaco"}))
    emulated.run_scaled(tmp_path, *plans)

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import emulated
from tests.support.interpreted import Interpreted
from tests.support.kernel_cases import GROUPED
from tests.support.nouns import ArtifactCache, Config, Launch, Machine, Patch, Record, Target, cases, heavy, registry
from tritongemm.backends.ck import backend as ck
from tritongemm.backends.torch import backend as torch_backend
from tritongemm.build import prepare
from tritongemm.cli import launch_plan
from tritongemm.codegen import render, template_facts
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.export import kernel_manifest
from tritongemm.plugins.contracts import Backend, Family, KernelBackend
from tritongemm.search.pruning import prune
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files
from tritongemm.system import settings

GFX942, GFX950, SM90 = map(target_files.load_target, ("gfx942", "gfx950", "sm90"))
NUZ, OCP = "fp8e4m3fnuz", "fp8e4m3fn"
FAMILY = registry.get(Family, "a8w8")
FP8 = FAMILY.problem(Problem(33, 48, 80, *matrices(NUZ, c="bf16"), bias="n"))
INT8 = replace(
    FP8, bias="m", a=FP8.a._replace(dtype="int8"), b=FP8.b._replace(dtype="int8", row_major=False), c=Operand("fp16")
)
SPLIT = Config("tile", 16, 32, 64, split_k=2, num_warps=2)
CONFIGS = (
    SPLIT, Config("tile", 16, 16, 64, options=(("swap_ab", 1),)), Config("gemv", 4, 32, 64, split_k=2),
    Config("stream_k", 16, 16, 64, 2, options=(("num_sms", 5),)), Config("tma", 16, 32, 64, 2),
    Config("persistent", 16, 32, 64, 2, options=(("epilogue_parts", 2),)),
    Config("stream_k_tma", 16, 16, 64, 2, options=(("num_sms", 5),)),
)  # fmt: skip


@cases(
    (FP8, GFX942, None),
    (INT8, GFX942, None),
    (INT8, SM90, None),
    (replace(FP8, b=FP8.b._replace(dtype="fp8e5m2fnuz")), GFX942, None),
    (FP8, GFX950, f"no matrix instruction for {NUZ} (A); its fp8 encoding is fn"),
    (replace(FP8, b=FP8.b._replace(dtype="int8")), GFX942, f"fp8 by fp8 or int8 by int8, not {NUZ} by int8"),
    (FAMILY.problem(Problem(8, 8, 8, *matrices())), GFX942, "not fp16 by fp16"),
    (replace(FP8, c=Operand(NUZ)), GFX942, f"gives bf16, fp16, fp32, not {NUZ}"),
    (replace(INT8, c=Operand("int32")), GFX942, "not int32"),
)
def test_what_it_is_for(problem: Problem, target: Target, reason: str | None, /) -> None:
    found = FAMILY.supports(problem, target)
    assert found if reason is None else reason in found.reason and not found


@pytest.mark.parametrize("problem", [FP8, heavy(INT8)], ids=["fp8", "int8"])
def test_every_template_applies_the_scales(interpreted: Interpreted, problem: Problem) -> None:
    if problem.a.type.is_fp8:
        problem = replace(problem, a=problem.a._replace(dtype=OCP), b=problem.b._replace(dtype=OCP))
    templates = {t for t in template_facts.names() if template_facts.kernel_template(t).interpreted}
    assert {t for t in templates if template_facts.reads_b(t, problem)} <= {c.template for c in (*CONFIGS, *GROUPED)}
    interpreted.check(problem, CONFIGS, SM90)


def test_the_search_space_has_configs_of_both_kinds_and_the_winner_takes_the_scales() -> None:
    for problem, target in ((FP8, GFX942), (INT8, GFX942), (INT8, GFX950), (replace(INT8, m=2), SM90)):
        found = {c.template for c in prune.prune(space(problem, target), problem, target).kept}
        assert "tile" in found and ("ws_tma" in found) == (target is SM90)
    text = render.winner(replace(FP8, bias="none"), SPLIT, GFX942, "")
    assert "def matmul(a, b, scale_a, scale_b):" in text
    assert "a, b, c, scale_a, scale_b, partial, counters, M, N, K," in text
    assert "def matmul(a, b, scale_a, scale_b, bias):" in render.winner(FP8, SPLIT, GFX942, "")
    assert "def matmul(a, b):" in render.winner(Problem(16, 16, 16), SPLIT, GFX942, "")


def plan(folder: Path, *options: str, arch: str = "gfx942") -> Path:
    size = [] if "-m" in options else ["-m", "33", "-n", "100", "-k", "77"]
    argv = [*size, "--family", "a8w8", "--target", arch, "-o", str(folder)]
    assert launch_plan.main([*argv, "--num_threads", "1", *options]) == 0
    return folder / "plan_0.json"


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "fp8"), ("gfx950", "int8")])
def test_a_plan_has_the_scales_and_runs(tmp_path: Path, arch: str, dtype: str) -> None:
    path = plan(tmp_path, "-dtype_a", dtype, "--config", SPLIT.name, "--bias-vector", "m", arch=arch)
    about = {b["name"]: b for b in json.loads(path.read_text())["buffers"]}
    assert list(about) == ["a", "b", "c", "scale_a", "scale_b", "bias", "workspace", "semaphore"]
    for name, shape in (("scale_a", [33, 1]), ("scale_b", [100])):
        assert (about[name]["role"], about[name]["dtype"], about[name]["shape"]) == (name, "fp32", shape)
        assert (about[name]["bytes"], about[name]["init"]) == (4 * shape[0], "random")
    emulated.run_scaled(tmp_path, path)


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "fp8"), ("gfx950", "int8")])
def test_sums_that_are_added_up_a_few_rows_at_a_time_are_scaled(tmp_path: Path, arch: str, dtype: str) -> None:
    """Factors and a bias along M have a slice's shape there, and the tile's where they are loaded before."""
    large = Config("tile", 128, 128, 64, group_m=4, split_k=4)
    size = ["-m", "165", "-n", "219", "-k", "523"]
    path = plan(tmp_path, *size, "-dtype_a", dtype, "--config", large.name, "--bias-vector", "m", arch=arch)
    emulated.run_scaled(tmp_path, path)


def test_exported_kernels_are_distinguished_from_those_without_scales(tmp_path: Path, monkeypatch: Patch) -> None:
    scaled = replace(INT8, bias="none", k=128, c=Operand("bf16"))
    record = Record(scaled, "gfx942", SPLIT, "triton", 1e-6, 0.0, "events")
    (path,), refused = kernel_manifest.export([record], tmp_path, Machine(GFX942, "", (), "", ""))
    assert not refused
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(path))
    asm = registry.get(KernelBackend, "asm")
    (config,) = asm.candidates(scaled, GFX942)
    assert asm.candidates(Problem(scaled.m, scaled.n, scaled.k, *matrices("int8", c="bf16", layout="TN")), GFX942) == []
    built, _, _ = asm.compile(asm.compile_job(config, scaled, GFX942))
    launch = registry.get(KernelBackend, "asm").launch(replace(built, path="x"), scaled, GFX942)
    ours = prepare.prepare_launches([record], GFX942, ArtifactCache(settings.cache_folder()))[scaled]
    assert isinstance(launch, Launch) and isinstance(ours, Launch) and launch.buffers == ours.buffers
    addresses = dict(zip(("a", "b", "scale_a", "scale_b", "workspace", "semaphore"), range(1, 7), strict=True))
    assert ours.pack(addresses).startswith(launch.pack(addresses)[: len(ours.pack(addresses))])


def test_instances_of_ck_and_where_pytorch_scales_rows() -> None:
    problem = replace(FP8, m=256, n=512, k=1024, b=FP8.b._replace(row_major=False))
    library = registry.get(KernelBackend, "ck")
    configs = library.candidates(replace(problem, bias="none", m=16, k=8192), GFX942)
    split = next(c for c in configs if c.split_k > 1)
    assert "every split" in library.check(split, replace(problem, m=16, k=8192), GFX942).reason
    text = ck.source(configs[0], problem)
    assert "C[M, N] = A @ B * scale_a * scale_b + bias" in text
    assert "ck::Tuple<Col, Row, Row>" in text and "ck::Tuple<float, float, ck::bhalf_t>" in text
    assert "{ scale_a, scale_b, bias }" in text
    integers = replace(problem, a=problem.a._replace(dtype="int8"), b=problem.b._replace(dtype="int8"))
    assert "using Sum = int32_t;" in ck.source(configs[0], integers)
    cutlass = registry.get(Backend, "cutlass")
    reason = cutlass.supports(
        replace(problem, a=problem.a._replace(dtype=OCP), b=problem.b._replace(dtype=OCP)), SM90
    ).reason
    assert reason == "its kernels can't apply scale_a in the epilogue"
    linear = FAMILY.problem(Problem(32, 64, 128, *matrices(OCP, c="bf16", layout="TN")))
    assert torch_backend.function(linear) == registry.baseline().torch_function(linear) == "_scaled_mm"
    assert torch_backend.function(replace(linear, c=Operand("fp16"))) == ""
    assert torch_backend.function(replace(INT8, m=32)) == "_int_mm"
    assert torch_backend.function(replace(INT8, m=16)) == ""
    text = render.module(linear, [SPLIT], SM90, 0.1, 1.0, library="_scaled_mm")
    assert "torch._scaled_mm(a, b, scale_a[:, None], scale_b[None, :], bias=None, out_dtype=c.dtype)" in text


AVAILABLE = registry.get(Backend, "ck").available()
CK = "ck.universal__bm32__bn32__bk128__gm1__sk{}__w4__s2__interwave0__pipeline1__wave_m2__xdl16"


@pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)
@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", "int8"), ("gfx950", "fp8")])
def test_an_instance_runs_as_its_host_code_launches_it(tmp_path: Path, arch: str, dtype: str) -> None:
    """Both from one binary: full tiles, and splits that add into a C zeroed before."""
    common = ["-dtype_a", dtype, "-col_b", "--timeout", "300"]
    one = plan(tmp_path / "one", *common, "--config", CK.format(1), arch=arch)
    two = plan(tmp_path / "two", *common, "-k", "1032", "-n", "96", "-m", "40", "--config", CK.format(4), arch=arch)
    for path, init in ((one, "poison"), (two, "zero")):
        about = {b["name"]: b for b in json.loads(path.read_text())["buffers"]}
        assert {"a", "b", "c", "scale_a", "scale_b"} == set(about) and about["c"]["init"] == init
    emulated.run_scaled(tmp_path, one, two)

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import emulated
from tests.support.nouns import Config, Defaults, InputError, Operand, Problem, cases, make_problem, matrices, registry
from tests.support.nouns import loader as target_files
from tritongemm.backends.ck import backend as ck
from tritongemm.cli import launch_plan
from tritongemm.export import launch_plans
from tritongemm.plugins.contracts import Family, KernelBackend, ScaleLayout
from tritongemm.search.space import space

GFX90A, GFX950 = target_files.load_target("gfx90a"), target_files.load_target("gfx950")
FAMILY = registry.get(Family, "a4w4_blockscale")
FP4 = FAMILY.problem(Problem(33, 64, 512, *matrices("fp4e2m1", c="bf16", layout="TN")))
SCALES = registry.get(ScaleLayout, "e8m0_32x8")
CK = registry.get(KernelBackend, "ck")
SMALL = "ck.mx__bm32__bn64__bk256__gm1__sk1__w2__s2__pipeline1__wave_m1"


def test_what_it_is_for() -> None:
    assert FAMILY.supports(FP4, GFX950)
    for problem, target, reason in (
        (FP4, GFX90A, "gfx90a has no matrix instruction for fp4e2m1 with scales of MX"),
        (replace(FP4, b=FP4.b._replace(row_major=True)), GFX950, "column-major"),
        (replace(FP4, bias="n"), GFX950, "no bias"),
        (replace(FP4, k=511), GFX950, "even K"),
        (replace(FP4, c=Operand("fp32")), GFX950, "bf16 or fp16, not fp32"),
        (replace(FP4, a=FP4.a._replace(dtype="int8")), GFX950, "not int8 by fp4e2m1"),
    ):
        assert reason in FAMILY.supports(problem, target).reason
    dense = Problem(33, 64, 512, *matrices("fp4e2m1", c="bf16"))
    assert "with scales: --family a4w4_blockscale" in registry.get(Family, "dense").supports(dense, GFX950).reason
    assert make_problem(Defaults.of(layout="TN", family="a4w4_blockscale"), 33, 64, 512) == FP4
    assert [axes.template for axes in space(FP4, GFX950).axes] == ["tile", "stream_k"]


def test_the_order_of_scales_is_its_own_inverse_and_aiters() -> None:
    scales = torch.arange(64 * 16).reshape(64, 16)
    mixed = SCALES.pack(scales)
    assert torch.equal(SCALES.unpack(mixed), scales)
    # A word of four: two rows 16 apart, of two groups 4 apart; 16 rows, then 4 groups, then blocks along K follow.
    assert mixed.reshape(-1)[:8].tolist() == [0, 16 * 16, 4, 16 * 16 + 4, 16, 17 * 16, 20, 17 * 16 + 4]
    assert int(mixed.reshape(-1)[64]) == 1 and int(mixed.reshape(-1)[256]) == 8 and int(mixed.reshape(-1)[512]) == 512


def test_operands_of_half_bytes_and_instances() -> None:
    assert FP4.bytes == 33 * 256 + 64 * 256 + 33 * 64 * 2 + 64 * 16 + 64 * 16  # scales of padded rows and groups
    known = launch_plans.operands(FP4)
    assert {n: (known[n]["bytes"], known[n]["dtype"], known[n]["shape"]) for n in ("a", "b", "scale_a", "scale_b")} == {
        "a": (33 * 256, "fp4e2m1", [33, 512]),
        "b": (64 * 256, "fp4e2m1", [512, 64]),
        "scale_a": (64 * 16, "e8m0", [64, 16]),
        "scale_b": (64 * 16, "e8m0", [64, 16]),
    }
    assert known["scale_a"]["strides"] == [16, 1]
    tensors = FAMILY.make_inputs(FP4, "cpu")
    assert {e.name: tuple(tensors[e.name].shape) for e in FP4.extras} == {"scale_a": (64, 16), "scale_b": (64, 16)}
    configs = CK.candidates(FP4, GFX950)
    assert configs and {c.template for c in configs} == {"mx"}
    for config in configs:
        assert Config.parse(config.name) == config and CK.check(config, FP4, GFX950)
        text = ck.source(config, FP4)
        assert "{{" not in text and "DeviceGemmMX_Xdl_CShuffleV3" in text
        assert f"{config.block_m}, {config.block_n}, 128, 16, 16, 16, 16, " in text, "K in bytes"
    assert "static_cast<const int32_t*>(scale_a)" in text and "void* scale_a, " in text
    assert {c.template for c in CK.candidates(Problem(64, 64, 512, *matrices("bf16", layout="TN")), GFX950)} == {
        "universal"
    }


@cases(
    (SMALL, replace(FP4, k=384), "K 384 must be a multiple of 256"),
    (SMALL.replace("sk1", "sk4"), FP4, "the first split only"),
    (SMALL, replace(FP4, n=48), "N 48 of 32"),
    (SMALL.replace("bn64", "bn32"), FP4, "don't tile 32 x 32"),
    (SMALL.replace("pipeline1", "pipeline3"), FP4, "2 K blocks for pipeline v3"),
    (SMALL, Problem(64, 64, 512, *matrices("bf16", layout="TN")), "has no template mx on such operands"),
)
def test_what_no_instance_computes(name: str, problem: Problem, reason: str, /) -> None:
    config = Config.parse(name)
    assert reason in CK.check(config, problem, GFX950).reason
    if "pipeline v3" not in reason:
        with pytest.raises(InputError):
            ck.source(config, problem)


@pytest.mark.skipif(not CK.available(), reason=CK.available().reason)
@pytest.mark.emulator
def test_an_instance_runs(tmp_path: Path) -> None:
    common = ["--family", "a4w4_blockscale", "-col_b", "--target", "gfx950", "--timeout", "600", "--num_threads", "1"]
    paths = []
    for m, n, k in (("100", "96", "1024"), ("1", "32", "256")):
        folder = tmp_path / m
        assert launch_plan.main(["-m", m, "-n", n, "-k", k, *common, "--config", SMALL, "-o", str(folder)]) == 0
        paths.append(folder / "plan_0.json")
        assert {b["name"] for b in json.loads(paths[-1].read_text())["buffers"]} == {
            "a", "b", "c", "scale_a", "scale_b",
        }  # fmt: skip
    emulated.run_scaled(tmp_path, *paths)

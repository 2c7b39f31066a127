"""Families whose B is shuffled beforehand: its order, who reads it, and AITER's kernels where they are at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import emulated
from tritongemm.backends.asm import backend as asm
from tritongemm.backends.asm import param_layout
from tritongemm.backends.torch import backend as torch_backend
from tritongemm.cli import launch_plan
from tritongemm.core import settings
from tritongemm.core.artifact import Artifact
from tritongemm.core.config import Config
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.export import launch_plans
from tritongemm.hip_ext.binaries.code_object import KernelInfo
from tritongemm.numerics.weight_layouts import shuffled_16x16
from tritongemm.plugins import _modules as registry
from tritongemm.search.space import space
from tritongemm.search_spaces import loader as target_files

GFX942, GFX950 = target_files.load_target("gfx942"), target_files.load_target("gfx950")
NUZ = "fp8e4m3fnuz"
PLAIN = {"dense_bpreshuffle": "dense", "a8w8_bpreshuffle": "a8w8", "a4w4_bpreshuffle": "a4w4_blockscale"}


def problem(family: str, m: int = 33, n: int = 256, k: int = 512, arch: str = "gfx942") -> Problem:
    a = {"dense": "bf16", "a8w8": "int8", "a4w4": "fp4e2m1"}[family.split("_")[0]]
    a = (NUZ if arch == "gfx942" else "fp8e4m3fn") if "a8w8_blockscale" in family else a
    return Problem(m, n, k, a, a, "bf16", True, False, family=family)


FAMILIES = [*PLAIN, "a8w8_blockscale_bpreshuffle"]


@pytest.mark.parametrize(("dtype", "run"), [(torch.int8, 16), (torch.bfloat16, 8), (torch.float32, 4)])
def test_the_order_of_b(dtype: torch.dtype, run: int) -> None:
    """16 bytes of each of 16 rows, then the next 16 bytes of each, until 32 elements are there; then on along K."""
    b = (
        torch.arange(96 * 48).to(dtype).reshape(48, 96).T
        if dtype != torch.int8
        else torch.arange(96 * 48, dtype=dtype).reshape(48, 96).T
    )
    mixed = shuffled_16x16.shuffled(b)
    assert mixed.shape == b.shape and mixed.T.is_contiguous()
    assert torch.equal(shuffled_16x16.plain(mixed), b)
    flat = mixed.T.reshape(-1)
    for k, n in ((0, 0), (run, 0), (0, 1), (33, 17), (95, 47), (run + 1, 15)):
        place = n // 16 * 16 * 96 + k // 32 * 512 + k % 32 // run * 16 * run + n % 16 * run + k % run
        assert flat[place] == b[k, n]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_reads_it(family: str) -> None:
    one = problem(family)
    plugin = registry.load("families", family)
    target = GFX950 if "a4w4" in family else GFX942
    assert plugin.unsupported(one, target) is None and shuffled_b(one)
    operands = plugin.inputs(one, "cpu")
    exact = plugin.reference(one, operands)
    assert exact.shape == (33, 256) and 0.05 < float(exact.square().mean().sqrt()) < 1e3
    b = shuffled_16x16.plain(operands["b"])
    if family in PLAIN:
        same = registry.load("families", PLAIN[family])
        assert torch.equal(same.reference(replace(one, family=PLAIN[family]), operands | {"b": b}), exact)
    else:
        i, j = 7, 200
        terms = (
            float(operands["a"][i, k]) * float(operands["scale_a"][k // 128, i])
            * float(b[k, j]) * float(operands["scale_b"][j // 128, k // 128])
            for k in range(512)
        )  # fmt: skip
        assert float(exact[i, j]) == pytest.approx(sum(terms), rel=1e-12)
    assert "column-major" in plugin.unsupported(replace(one, row_major_b=True), target)
    assert plugin.unsupported(replace(one, n=40), target)
    assert plugin.unsupported(replace(one, k=520), target)


@pytest.mark.parametrize("family", FAMILIES)
def test_who_reads_it(family: str) -> None:
    one = problem(family)
    target = GFX950 if "a4w4" in family else GFX942
    assert not space(one, target).axes and not space(one, target, backend="ck").axes
    assert torch_backend.function(one) == ""
    assert launch_plans.operands(one)["b"]["order"] == "shuffled"
    assert "order" not in launch_plans.operands(replace(one, family="dense", dtype_a="bf16", dtype_b="bf16"))["b"]


MANIFEST = "tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n"
I8, MX, BLOCK = "I8gemm_bf16_perTokenI8_32x128", "f4gemm_bf16_per1x32Fp4_256x256", "fp8gemm_bf16_blockscale_32x128"


@pytest.mark.parametrize(
    ("symbol", "shuffled", "one", "reason"),
    [
        (I8, 1, problem("a8w8_bpreshuffle"), None),
        (I8, 1, problem("a8w8_bpreshuffle", k=192), "multiple of 128 and N of 256"),
        (I8, 1, replace(problem("a8w8_bpreshuffle"), dtype_c="fp32"), "writes bf16"),
        (I8, 1, replace(problem("a8w8_bpreshuffle"), bias="n"), "adds nothing"),
        (I8, 1, replace(problem("a8w8_bpreshuffle"), dtype_a=NUZ, dtype_b=NUZ), "int8 with a scale"),
        (I8, 1, replace(problem("a8w8_bpreshuffle"), family="a8w8"), "B must be shuffled beforehand"),
        (I8, 0, problem("a8w8_bpreshuffle"), "reads B as it is"),
        (I8, 1, problem("a8w8_bpreshuffle", m=2**24), "beyond its 32-bit"),
        (BLOCK, 1, problem("a8w8_blockscale_bpreshuffle", m=1), None),
        (BLOCK, 1, problem("a8w8_bpreshuffle"), "fp8 with a scale for each 128"),
        (MX, 1, problem("a4w4_bpreshuffle"), None),
        (MX, 1, problem("a4w4_bpreshuffle", m=32, k=256), "512 scales of A before it looks at M; A has 256"),
        (MX, 0, replace(problem("a4w4_bpreshuffle", m=512), family="a4w4_blockscale"), None),
        (MX, 0, replace(problem("a4w4_bpreshuffle"), family="a4w4_blockscale"), "M must be a multiple of 256"),
    ],
)  # fmt: skip
def test_which_kernels_fit(tmp_path: Path, symbol: str, shuffled: int, one: Problem, reason: str | None) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(
        f"{MANIFEST}32,256,1,{shuffled},{symbol},k.co\n".replace("32,256", "256,256" if symbol == MX else "32,256")
    )
    found, refused = asm.survey(one, GFX950 if symbol == MX else GFX942, [path])
    if reason is None:
        assert [c.split_k for c in found] == [1], "several splits add into a C that no launch zeroes"
    else:
        assert not found and reason in refused[symbol]


def test_a_bias_of_zeros() -> None:
    """The kernels with scales read one whatever they are told."""
    one = problem("a8w8_bpreshuffle")
    kernel = KernelInfo("k", 512, 0, 65536, 64, 208, 256, ())
    fields = [[f.name, f.offset] for f in param_layout.fields(param_layout.LAYOUTS["i8"], kernel)]
    facts = {"layout": "i8", "fields": fields, "parameter_bytes": 208, "grid": "nk,m", "dynamic_shared": 0}
    config = Config("k", 32, 128, 64, backend="asm")
    launch = asm.launch(Artifact(config, "", "k.co", "k", threads=256, launch=facts), one, GFX942)
    assert [p.value for p in launch.params][:6] == ["c", "a", "b", "scale_a", "scale_b", "semaphore"]
    assert [(b.name, b.bytes) for b in launch.buffers] == [("semaphore", 4 * one.n)]
    assert [e.name for e in extras(one)] == ["scale_a", "scale_b"]


@pytest.mark.skipif(not settings.asm_manifests(), reason="TRITONGEMM_ASM_MANIFESTS names no manifest")
@pytest.mark.parametrize("family", [*FAMILIES, "a4w4_blockscale"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_of_the_environment_run_right(tmp_path: Path, arch: str, family: str) -> None:
    one = replace(problem(family, m=256 if family == "a4w4_blockscale" else 100, arch=arch))
    if not asm.survey(one, target_files.load_target(arch))[0]:
        pytest.skip(f"the manifests have no kernel of {family} for {arch}")
    size = ["-m", str(one.m), "-n", str(one.n), "-k", str(one.k), "-col_b", "-dtype_a", one.dtype_a]
    argv = [*size, "--family", family, "--target", arch, "--backend", "asm", "-o", str(tmp_path), "--num_threads", "1"]
    assert launch_plan.main(argv) == 0
    emulated.run_scaled(tmp_path, tmp_path / "plan_0.json")

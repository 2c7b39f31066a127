import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import emulated
from tests.support.aiter_wheel import gemm_manifests
from tests.support.nouns import Artifact, Config, Family, KernelBackend, Patch, WeightLayout, cases, each, registry
from tests.support.nouns import loader as target_files
from tritongemm.backends.asm import backend as asm
from tritongemm.backends.asm import param_layout, scaled
from tritongemm.backends.torch import backend as torch_backend
from tritongemm.cli import launch_plan
from tritongemm.core.problem import PLAIN, Operand, Problem, matrices
from tritongemm.export import launch_plans
from tritongemm.hip_ext.binaries.code_object import KernelInfo
from tritongemm.search.space import space

GFX942, GFX950 = target_files.load_target("gfx942"), target_files.load_target("gfx950")
NUZ = "fp8e4m3fnuz"
FAMILIES = ("dense", "a8w8", "a4w4_blockscale", "a8w8_blockscale")
LAYOUT = registry.get(WeightLayout, "shuffled_16x16")


def problem(
    family: str, m: int = 33, n: int = 256, k: int = 512, arch: str = "gfx942", order: str = LAYOUT.name
) -> Problem:
    a = {"dense": "bf16", "a8w8": "int8", "a4w4": "fp4e2m1"}[family.split("_")[0]]
    a = (NUZ if arch == "gfx942" else "fp8e4m3fn") if "a8w8_blockscale" in family else a
    return registry.get(Family, family).problem(Problem(m, n, k, *matrices(a, c="bf16", layout="TN", order=order)))


@each(("dtype", "run"), [(torch.int8, 16), (torch.bfloat16, 8), (torch.float32, 4)])
def test_the_order_of_b(dtype: torch.dtype, run: int) -> None:
    """16 bytes of each of 16 rows, then the next 16 bytes of each, until 32 elements are there; then on along K."""
    b = (
        torch.arange(96 * 48).to(dtype).reshape(48, 96).T
        if dtype != torch.int8
        else torch.arange(96 * 48, dtype=dtype).reshape(48, 96).T
    )
    mixed = LAYOUT.pack(b)
    assert mixed.shape == b.shape and mixed.T.is_contiguous() and torch.equal(LAYOUT.unpack(mixed), b)
    flat = mixed.T.reshape(-1)
    for k, n in ((0, 0), (run, 0), (0, 1), (33, 17), (95, 47), (run + 1, 15)):
        place = n // 16 * 16 * 96 + k // 32 * 512 + k % 32 // run * 16 * run + n % 16 * run + k % run
        assert flat[place] == b[k, n]


@each("family", FAMILIES)
def test_who_reads_it(family: str) -> None:
    one = problem(family)
    target = GFX950 if "a4w4" in family else GFX942
    assert {axes.template for axes in space(one, target).axes} == {"tile", "stream_k"}
    assert registry.get(KernelBackend, "ck").candidates(replace(one, k=1024), target)
    described = {axes.template for axes in space(one, target_files.load_target("sm90")).axes}
    assert not described & {"tma", "persistent", "ws_tma"} and torch_backend.function(one) == ""
    assert launch_plans.operands(one)["b"]["order"] == "shuffled"
    assert "order" not in launch_plans.operands(replace(one, b=one.b._replace(order=PLAIN)))["b"]


MANIFEST = "tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name\n"
I8, MX, BLOCK = "I8gemm_bf16_perTokenI8_32x128", "f4gemm_bf16_per1x32Fp4_256x256", "fp8gemm_bf16_blockscale_32x128"


@cases(
    (I8, 1, problem("a8w8"), None),
    (I8, 1, problem("a8w8", k=192), "multiple of 128 and N of 256"),
    (I8, 1, replace(problem("a8w8"), c=Operand("fp32")), "writes bf16"),
    (I8, 1, replace(problem("a8w8"), bias="n"), "adds nothing"),
    (I8, 1, replace(problem("a8w8"), a=Operand(NUZ), b=Operand(NUZ, False, LAYOUT.name)), "int8 with a scale"),
    (I8, 1, problem("a8w8", order=PLAIN), "B must be shuffled beforehand"),
    (I8, 0, problem("a8w8"), "reads B as it is"),
    (I8, 1, problem("a8w8", m=2**24), "beyond its 32-bit"),
    (BLOCK, 1, problem("a8w8_blockscale", m=1), None),
    (BLOCK, 1, problem("a8w8"), "fp8 with a scale for each 128"),
    (MX, 1, problem("a4w4_blockscale"), None),
    (MX, 1, problem("a4w4_blockscale", m=32, k=256), "512 scales of A before it looks at M; A has 256"),
    (MX, 0, problem("a4w4_blockscale", m=512, order=PLAIN), None),
    (MX, 0, problem("a4w4_blockscale", order=PLAIN), "M must be a multiple of 256"),
)  # fmt: skip
def test_which_kernels_fit(symbol: str, shuffled: int, one: Problem, reason: str | None, /, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(
        f"{MANIFEST}32,256,1,{shuffled},{symbol},k.co\n".replace("32,256", "256,256" if symbol == MX else "32,256")
    )
    found, refused = asm.survey(one, GFX950 if symbol == MX else GFX942, [path])
    if reason is None:
        assert found[0].split_k == 1 and {c.template for c in found} == {symbol}
    else:
        assert not found and reason in refused[symbol]


@cases(
    (MX, "a4w4_blockscale", 7168, [1, 2, 4, 8]),  # 8 shares of full steps are 7, which AITER launches so
    (MX, "a4w4_blockscale", 512, [1, 2]),
    (I8, "a8w8", 7168, [1, 2, 3, 4, 5, 6, 7, 8]),
    (I8, "a8w8", 1280, [1, 2, 3, 4, 5]),
    (BLOCK, "a8w8_blockscale", 2048, [1, 2, 3, 4, 6, 8]),
)
def test_splits_that_aiter_tries(symbol: str, family: str, k: int, offered: list[int], /, tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(f"{MANIFEST}32,256,1,1,{symbol},k.co\n")
    found, _ = asm.survey(problem(family, m=128, k=k), GFX950 if symbol == MX else GFX942, [path])
    assert sorted(c.split_k for c in found) == offered and scaled.groups_along_k("fp4", 7168, 8) == 7


def test_a_bias_of_zeros() -> None:
    """The kernels with scales read one whatever is asked for."""
    one = problem("a8w8")
    kernel = KernelInfo("k", 512, 0, 65536, 64, 208, 256, ())
    fields = [[f.name, f.offset] for f in param_layout.fields(param_layout.LAYOUTS["i8"], kernel)]
    facts = {"layout": "i8", "fields": fields, "parameter_bytes": 208, "grid": "nk,m", "dynamic_shared": 0}
    config = Config("k", 32, 128, 64, backend="asm")
    launch = registry.get(KernelBackend, "asm").launch(
        Artifact(config, "", "k.co", "k", threads=256, launch=facts), one, GFX942
    )
    assert [p.value for p in launch.params][:6] == ["c", "a", "b", "scale_a", "scale_b", "semaphore"]
    assert [(b.name, b.bytes) for b in launch.buffers] == [("semaphore", 4 * one.n)]
    assert [e.name for e in one.extras] == ["scale_a", "scale_b"]


@pytest.mark.emulator
@pytest.mark.parametrize(("family", "order"), [*((f, LAYOUT.name) for f in FAMILIES), ("a4w4_blockscale", PLAIN)])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_aiters_kernels_run_right(tmp_path: Path, monkeypatch: Patch, arch: str, family: str, order: str) -> None:
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", os.pathsep.join(map(str, gemm_manifests())))
    one = problem(family, 256 if order == PLAIN else 100, arch=arch, order=order)
    if not asm.survey(one, target_files.load_target(arch))[0]:
        pytest.skip(f"the manifests have no kernel of {family} for {arch}")
    size = ["-m", str(one.m), "-n", str(one.n), "-k", str(one.k), "-col_b", "-dtype_a", one.a.dtype]
    name = family if order == PLAIN else next(iter(registry.get(Family, family).variants))
    argv = [*size, "--family", name, "--target", arch, "--backend", "asm", "-o", str(tmp_path), "--num_threads", "1"]
    assert launch_plan.main(argv) == 0
    emulated.run_scaled(tmp_path, tmp_path / "plan_0.json")

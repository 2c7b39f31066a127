from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT, emulated, forked
from tests.support.interpreted import Interpreted
from tests.support.nouns import Config, Problem, Target, apart, cases, each, fails, heavy, registry
from tests.support.nouns import loader as target_files
from tests.support.products import product
from tritongemm.codegen import modules, render
from tritongemm.plugins.contracts import Family, KernelBackend, WeightLayout

ORDER = "shuffled_16x16"
GFX942, GFX950, SM90 = map(target_files.load_target, ("gfx942", "gfx950", "sm90"))
NUZ, OCP, FP4 = "fp8e4m3fnuz", "fp8e4m3fn", "fp4e2m1"
MX = ("mx", "mx_shuffled")
MX_CASES = ("fp4 mx", "fp4 mx_shuffled", "ocp mx")
SCALES = ("tensor", "row", "block", "block_rows", "group", "group_rows")
CONFIGS = (
    Config("tile", 16, 32, 64, 2, 2, options=(("xcds", 8),)),
    Config("tile", 16, 16, 128, options=(("swap_ab", 1),)),
    Config("gemv", 1, 16, 128, split_k=2),
    Config("gemv", 4, 16, 256),
    Config("stream_k", 16, 32, 128, 2, options=(("num_sms", 3),)),
)
EMULATED = (
    Config("tile", 16, 32, 128, 2, 2, 2),
    Config("tile", 32, 16, 64, 1, 3, 2, 2, (("poll", 1), ("swap_ab", 1))),
    Config("tile", 64, 128, 128, 4, 1, 4, 2, (("matrix_instr_nonkdim", 16), ("xcds", 8))),
    Config("gemv", 1, 16, 256, num_warps=1, num_stages=1),
    Config("gemv", 4, 16, 256, split_k=2, num_warps=4, num_stages=1),
    Config("stream_k", 32, 32, 128, 2, 1, 4, options=(("num_sms", 7),)),
)
triton = registry.get(KernelBackend, "triton")


def problem(dtype: str, scales: str = "", m: int = 17, n: int = 144, k: int = 352, **more: Any) -> Problem:
    family = "dense" if not scales else "a8w8" if scales in ("tensor", "row") else "a8w8_blockscale"
    family = "a4w4_blockscale" if dtype == FP4 else family
    return product(family, m, n, k, f"{dtype} {dtype} {more.pop('dtype_c', 'bf16')}", scales, order=ORDER, **more)


def small(dtype: str, scales: str = "", **more: Any) -> Problem:
    """One that the interpreter is done with soon: two groups along K, blocks that M, N and K do not fill."""
    return problem(dtype, scales, 5, 48, 192 if dtype == FP4 else 160, **more)


def usable(one: Problem, target: Target, configs: tuple[Config, ...]) -> list[Config]:
    """The configs that can compute a problem: blocks of the tile must be within a scale."""
    return [c for c in configs if triton.check(c, one, target)]


QUICK = (
    (small("bf16", bias="n"), GFX942),
    (small("int8", "row", bias="n"), GFX942),
    (small(NUZ, "block"), GFX942),
    (small(FP4, MX[-1]), GFX950),
)
OTHERS = (
    (problem("bf16", m=1, n=16, k=32), SM90),
    (small("int8", dtype_c="int32"), GFX942),
    (small("fp16", dtype_c="fp16"), SM90),
    (small("int8", "block"), GFX942),
    *((small(NUZ, scales), GFX942) for scales in SCALES if scales != "block"),
    *((small(OCP, scales), GFX950) for scales in MX),
    *((small(FP4, scales), GFX950) for scales in MX[:-1]),
)


@apart(*QUICK, *(heavy(*case) for case in OTHERS), ids=lambda value: getattr(value, "key", ""))
def test_kernels_in_the_interpreter(one: Problem, target: Target, /, interpreted: Interpreted) -> None:
    configs = usable(one, target, CONFIGS)
    assert {c.template for c in configs} == {"tile", "stream_k", "gemv"}
    interpreted.check(one, configs, target)


def test_a_module_shuffles_its_own_operand(tmp_path: Path) -> None:
    path = modules.write_candidates(problem(NUZ, "row", m=5, n=48, k=64), [CONFIGS[0]], GFX942, tmp_path)
    ran = forked.run([str(path)], ROOT)
    assert ran.returncode == 0 and "verified by Triton's interpreter" in ran.stdout, ran.stdout + ran.stderr
    module = modules.run_text(path.read_text(), "generated")
    b = torch.arange(48 * 64).to(torch.int8).view(48, 64).T
    assert torch.equal(module.in_pieces(b.view(torch.float8_e4m3fnuz)).view(torch.int8), _packed(b))
    fails(ValueError, "N must be a multiple of 16", module.in_pieces, b[:, :40])


def _packed(b: torch.Tensor) -> torch.Tensor:
    return registry.get(WeightLayout, ORDER).pack(b)


@each("dtype", ["bf16", "fp8e4m3fnuz", "int8"])
def test_pieces_are_the_order(dtype: str) -> None:
    """What kernels assume of the order, beside the order itself."""
    one = problem(dtype, dtype_c="int32" if dtype == "int8" else "bf16")
    pieces = registry.get(WeightLayout, ORDER).pieces(one.b.type)
    assert pieces is not None
    element = {1: torch.int8, 2: torch.int16}[one.b.type.bytes]
    b = torch.randint(-(2**7), 2**7, (one.n, one.k)).to(element)
    groups = b.view(one.n // pieces.columns, pieces.columns, one.k // pieces.run, pieces.run)
    assert torch.equal(groups.transpose(1, 2).reshape(one.n, one.k).T, _packed(b.T))


@cases(
    (Config("gemv", 1, 8, 256), "read in blocks of 16 columns and 16 elements along K, not 8 and 256"),
    (Config("tma", 64, 64, 64), "does not run template tma"),
    (Config("persistent", 64, 64, 64), "does not run template persistent"),
    (Config("grouped", 16, 32, 64), "does not run template grouped"),
)
def test_configs_that_can_not_read_it(config: Config, reason: str, /) -> None:
    assert reason in triton.check(config, problem(OCP, "row"), SM90).reason


@each(("n", "k"), [(40, 64), (48, 48)])
def test_sizes_that_do_not_divide_are_refused(n: int, k: int) -> None:
    one = problem("bf16", n=n, k=k)
    assert "N a multiple of 16 and K of 32" in registry.get(Family, "dense").supports(one, GFX942).reason


def test_every_candidate_reads_complete_groups() -> None:
    for dtype, scales in (("bf16", ""), (NUZ, "row"), (NUZ, "block"), ("int8", "row")):
        for m in (1, 16, 4096):
            one = problem(dtype, scales, m=m, n=4096, k=7168)
            configs = triton.candidates(one, GFX942)
            assert configs and all(c.block_n % 16 == 0 for c in configs)
            assert m > 1 or "gemv" in {c.template for c in configs}
    assert "gemv" not in {c.template for c in triton.candidates(one, GFX942)}
    assert render.kernel_facts(replace(one, b=one.b._replace(order="plain")), GFX942).pieces is None


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("case", ["bf16", "int8 row", "int8 group", "fp16", *(f"fp8 {s}" for s in SCALES), *MX_CASES])
def test_amd_kernels_run_in_an_emulator(tmp_path: Path, arch: str, case: str) -> None:
    """At odd M and sizes that divide into pieces alone, factors with outliers, memory operations as late as can be."""
    target = target_files.load_target(arch)
    name, _, scales = case.partition(" ")
    dtype = {"fp4": FP4, "ocp": OCP, "fp8": NUZ if target.fp8 == "fnuz" else OCP}.get(name, name)
    k = 448 if dtype == FP4 else 352
    one = problem(dtype, scales, k=k, bias="n" if scales in ("", "row") else "none")
    configs = usable(one, target, EMULATED)
    assert len(configs) >= 5
    emulated.run_configs(tmp_path, one, configs, target)

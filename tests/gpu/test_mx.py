"""Powers of two along K (OCP MX) on a real GPU: kernels against float64, `quantize`, `scaled_mm` of what it makes."""

from typing import Any

import pytest
import torch

import tritongemm
from tests.gpu.here import needs_gpu, triton
from tests.gpu.test_numeric import verify_all
from tritongemm.build.pool import BuildPool
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.operations import microscaling
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

FORMS = (("fp4e2m1", ""), ("fp4e2m1", "mx"), ("fp8e4m3fn", "mx"), ("fp8e5m2", "mx_shuffled"))
pytestmark = needs_gpu
SWAPPED = (("swap_ab", 1),)
CONFIGS = (
    Config("tile", 64, 64, 128, 4, 1, 4, 2),
    Config("tile", 16, 64, 256, 1, 3, 4, 3, SWAPPED),
    Config("tile", 128, 128, 128, 4, 1, 8, 3),
    Config("stream_k", 64, 64, 128, 8, 1, 4, 2),
    Config("tma", 64, 64, 128, 8, 2, 4, 3),
    Config("persistent", 64, 64, 128, 8, 1, 4, 2, (("epilogue_parts", 2), ("warp_specialize", 0))),
    Config("stream_k_tma", 64, 64, 128, 8, 1, 4, 3, (("share_more", 1),)),
    Config("gemv", 1, 8, 256, 1, 1, 4, 1),
    Config("gemv", 4, 16, 256, 1, 2, 4, 1),
)
GROUPED = (
    Config("grouped", 16, 64, 128, 4, 1, 4, 2, (("per_unit", 2),)),
    Config("grouped", 64, 64, 128, 4, 1, 4, 3, SWAPPED),
    Config("grouped_tile", 64, 64, 128, 4, 1, 4, 2),
    Config("grouped_tma", 64, 64, 128, 4, 1, 4, 3),
)
COUNTS = (7, 0, 133, 1, 0)
TORCH = {"fp4e2m1": torch.uint8, "fp8e4m3fn": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2}


def of(dtype: str, scales: str, m: int, n: int, k: int, **more: Any) -> Problem:
    family = registry.get(Family, "a4w4_blockscale" if dtype == "fp4e2m1" else "a8w8_blockscale")
    operands = matrices(dtype, c="bf16", layout="TN", shared=more.pop("shared", ""))
    made: Problem = family.problem(Problem(m, n, k, *operands, **more), scales)
    return made


@pytest.mark.parametrize(("dtype", "scales"), FORMS)
def test_kernels_apply_powers_of_two(gpu: GpuEvaluator, compiler: BuildPool, dtype: str, scales: str) -> None:
    if not gpu.target.has("dot_scaled"):
        pytest.skip(f"{gpu.target.name} has no dot_scaled")
    sizes = (300, 528, 1040), (7, 45, 330), (72, 136, 2176)
    verify_all(gpu, compiler, [of(dtype, scales, *size) for size in sizes], CONFIGS)


@pytest.mark.parametrize(("dtype", "scales"), FORMS)
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_each_product_of_a_batch_has_its_own(
    gpu: GpuEvaluator, compiler: BuildPool, dtype: str, scales: str, shared: str
) -> None:
    for size in ((72, 136, 1088), (5, 45, 330)):
        problem = of(dtype, scales, *size, batch=3, shared=shared)
        configs = [c for c in CONFIGS if triton().check(c, problem, gpu.target)]
        assert {"tile", "gemv"} <= {c.template for c in configs}
        verify_all(gpu, compiler, [problem], configs)


@pytest.mark.parametrize(("dtype", "scales"), FORMS)
@pytest.mark.parametrize("room", [0, 140])
def test_each_group_has_its_own(gpu: GpuEvaluator, compiler: BuildPool, dtype: str, scales: str, room: int) -> None:
    groups = Groups(len(COUNTS), room, "captured", COUNTS)
    for n, k in ((136, 1088), (45, 330)):
        problem = of(dtype, scales, sum(COUNTS), n, k, groups=groups)
        configs = [c for c in GROUPED if triton().check(c, problem, gpu.target)]
        assert {"grouped", "grouped_tile"} <= {c.template for c in configs}
        verify_all(gpu, compiler, [problem], configs)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", ["rows", "e8m0_32x8"])
def test_the_kernel_quantises_as_pytorchs_operations_do(dtype: str, layout: str) -> None:
    x = torch.randn(77, 1056, device="cuda") * torch.logspace(-6, 6, 77, device="cuda")[:, None]
    x[5], x[6, 40] = 0, float("nan")
    for given in (x, x.bfloat16(), x[:1]):
        q, powers = tritongemm.quantize(given, "mx", TORCH[dtype], layout)
        wanted, exponents = microscaling.by_torch(given, TORCH[dtype], layout)
        assert torch.equal(powers, exponents)
        there = torch.arange(len(given), device="cuda") != 6
        assert torch.equal(q.view(torch.uint8)[there], wanted.view(torch.uint8)[there])

"""Weights of four bits on a real GPU: zero points, an A of eight bits, groups; kernels against float64."""

from dataclasses import replace

import pytest

from tests.gpu.here import fp8, needs_gpu, triton
from tests.gpu.test_numeric import verify_all
from tritongemm.build.pool import BuildPool
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family

pytestmark = needs_gpu
CONFIGS = (
    Config("tile", 64, 64, 64, 4, 1, 4, 3),
    Config("tile", 16, 64, 128, 1, 3, 4, 4, (("swap_ab", 1),)),
    Config("tile", 16, 64, 256, 1, 2, 4, 3, (("poll", 1), ("swap_ab", 1))),
)
GROUPED = (
    Config("grouped", 16, 64, 128, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("grouped", 64, 64, 64, 4, 1, 4, 3, (("per_unit", 2),)),
    Config("grouped_tile", 16, 64, 256, 1, 1, 4, 3),
)
COUNTS = (7, 0, 133, 1)
CASES = {
    "a16w4": ("bf16", "int4", ("weight_128_zeros", "weight_32_zeros", "weight_32"), "halves_32"),
    "a16w4 fp16": ("fp16", "int4", ("weight_64_zeros_fp16",), "plain"),
    "a16w4 fp4": ("bf16", "fp4e2m1", ("weight_mx",), "halves_32"),
    "a16w4 nvfp4": ("bf16", "fp4e2m1", ("weight_16",), "plain"),
    "a8w4": ("fp8", "fp4e2m1", ("mx", "row_weight_mx", "block_weight_mx", "block_rows_weight_mx"), "halves_32"),
    "a8w4 int4": ("fp8", "int4", ("row_weight_128_zeros", "block_weight_128"), "plain"),
    "a8w4 int8": ("int8", "int4", ("row_weight_64",), "halves_32"),
}


@pytest.mark.parametrize("room", [None, 0, 140], ids=["one", "groups", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_right(gpu: GpuEvaluator, compiler: BuildPool, case: str, room: int | None) -> None:
    of_a, of_b, granularities, order = CASES[case]
    of_a = fp8(gpu.target) if of_a == "fp8" else of_a
    family = registry.get(Family, case.split()[0])
    groups = None if room is None else Groups(len(COUNTS), room, "captured", COUNTS)
    for scales in granularities:
        plain = Problem(sum(COUNTS), 328, 1152, *matrices(of_a, of_b, "bf16", layout="TN"), groups=groups)
        problem = family.problem(plain, scales)
        problem = replace(problem, b=problem.b._replace(order=order), bias="none" if groups else "n")
        if not family.supports(problem, gpu.target):
            continue
        configs = [c for c in (GROUPED if groups else CONFIGS) if triton().check(c, problem, gpu.target)]
        assert len(configs) >= 2
        verify_all(gpu, compiler, [problem], configs)

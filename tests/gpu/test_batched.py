from dataclasses import replace

import pytest
import torch

import tritongemm
from tests.gpu.here import fp8, needs_gpu, normal, record
from tests.gpu.test_numeric import LAYOUTS, verify_all
from tests.support.nouns import BuildPool, Config, Dispatcher, Family, Problem, matrices, registry, verify
from tritongemm.measure.gpu_evaluator import GpuEvaluator

pytestmark = needs_gpu
POINTERS = (
    Config("tile", 32, 64, 64, 4, 1, 4, 2),
    Config("tile", 64, 32, 32, 1, 3, 4, 2),
    Config("tile", 16, 64, 64, 1, 1, 4, 3, (("swap_ab", 1),)),
    Config("tile", 16, 64, 64, 1, 3, 4, 3, (("poll", 1),)),
    Config("tile", 16, 64, 64, 1, 3, 4, 3, (("ahead", 2), ("early", 1), ("swap_ab", 1))),
    Config("gemv", 4, 16, 256, 1, 2, 4, 2),
    Config("gemv", 1, 16, 256, 1, 4, 4, 1, (("early", 1), ("poll", 1))),
)
CONFIGS = (
    *POINTERS,
    Config("tma", 64, 64, 64, 8, 2, 4, 3),
    Config("tma", 16, 64, 64, 1, 4, 4, 3, (("poll", 1), ("swap_ab", 1))),
)


@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize(("row_a", "row_b"), LAYOUTS)
def test_products_of_odd_sizes(gpu: GpuEvaluator, compiler: BuildPool, row_a: bool, row_b: bool, shared: str) -> None:
    pointers = [
        Problem(*size, *matrices(layout="NT"[row_a] + "NT"[row_b], shared=shared), bias=bias, batch=batch)
        for size, bias, batch in (((7, 33, 70), "n", 5), ((33, 100, 777), "m", 3), ((1, 1, 1), "none", 70))
    ]
    verify_all(gpu, compiler, pointers, POINTERS)
    # Complete blocks of K, which descriptors of operands that are stored by rows of K need.
    entire = Problem(72, 136, 192, *matrices(layout="NT"[row_a] + "NT"[row_b], shared=shared), batch=7)
    verify_all(gpu, compiler, [entire], CONFIGS)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
def test_dtypes(gpu: GpuEvaluator, compiler: BuildPool, dtype: str) -> None:
    wide = "int32" if dtype == "int8" else dtype
    problem = Problem(33, 96, 320, *matrices(dtype, c=wide, layout="TN"), batch=9)
    verify_all(gpu, compiler, [problem, replace(problem, b=problem.b._replace(shared=True))], CONFIGS)


@pytest.mark.parametrize(
    ("scales", "dtype"), [("row", "fp8"), ("row", "int8"), ("block", "fp8"), ("block_rows", "fp8"), ("group", "fp8")]
)
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_scales_of_each_product(gpu: GpuEvaluator, compiler: BuildPool, scales: str, dtype: str, shared: str) -> None:
    name = "int8" if dtype == "int8" or gpu.target.fp8 == "none" else fp8(gpu.target)
    family: Family = registry.get(Family, "a8w8" if scales == "row" else "a8w8_blockscale")
    operands = matrices(name, c="bf16", layout="TN", shared=shared)
    problem = family.problem(Problem(33, 272, 640, *operands, bias="n", batch=9), scales)
    verify_all(gpu, compiler, [problem], [c for c in CONFIGS if c.block_k >= 32])


def test_bmm_reads_operands_as_stored(dispatcher: Dispatcher) -> None:
    problem = Problem(33, 136, 528, *matrices("bf16", layout="TN"), batch=6, bias="none")
    rows = [record(p, Config("tile", 32, 64, 64, 4, 2, 4, 2)) for p in (problem, replace(problem, bias="n"))]
    assert tritongemm.load(rows) == 2
    b = normal(6, 136, 528).transpose(1, 2)
    shared = normal(136, 528).t().expand(6, 528, 136)
    heads = normal(33, 6, 544)[:, :, :528].transpose(0, 1)
    for a in (normal(6, 33, 528), heads):
        for weights in (b, shared):
            for bias in (None, normal(136), normal(6, 136), normal(6, 1, 136)):
                added = 0 if bias is None else bias.double().view(-1, 1, 136)
                assert tritongemm.explain("bmm", a, weights, bias).startswith("exact")
                assert verify.deviation(tritongemm.bmm(a, weights, bias), a.double() @ weights.double() + added) < 2**-7
    out = torch.zeros(33, 6, 136, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    assert tritongemm.bmm(heads, b, out=out) is out and torch.equal(out, tritongemm.bmm(heads, b))
    assert tritongemm.explain("bmm", normal(6, 528, 33).transpose(1, 2), b).startswith("fallback")
    torch.compile(lambda a, b, out: tritongemm.bmm(a, b, out=out), fullgraph=True)(heads, b, out.zero_())
    assert torch.equal(out, tritongemm.bmm(heads, b))

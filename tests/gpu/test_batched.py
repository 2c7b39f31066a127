"""Batches on a real GPU: kernels against float64 at odd sizes, libraries, tuning, and calls of `tritongemm.bmm`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tritongemm
from tests.gpu.here import fp8, graph_of, needs_gpu, normal, record, replayed
from tests.gpu.test_numeric import LAYOUTS, verify_all
from tests.support.nouns import Backend, BuildPool, Config, Family, LibraryBackend, Machine, Problem, matrices, registry
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.numerics import verify
from tritongemm.serving.dispatcher import default_dispatcher

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
def test_each_product_is_right_at_odd_sizes(
    gpu: GpuEvaluator, compiler: BuildPool, row_a: bool, row_b: bool, shared: str
) -> None:
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


@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize(
    ("name", "family", "dtype", "bias"),
    [
        *((name, "dense", "bf16", bias) for name in ("torch", "blaslt") for bias in ("none", "n", "m")),
        *(("torch", family, dtype, "none") for family, dtype in (("a8w8", "fp8"), ("a8w8", "int8"))),
        ("torch", "a8w8_blockscale", "fp8", "none"),
    ],
)
def test_libraries(gpu_machine: Machine, name: str, family: str, dtype: str, bias: str, shared: str) -> None:
    """Where a library has no batches of a kind, the backend computes one product after another."""
    if not registry.available(Backend, name):
        pytest.skip(registry.available(Backend, name).reason)
    if dtype == "fp8":
        dtype = "int8" if gpu_machine.target.fp8 == "none" else fp8(gpu_machine.target)
    plugin, backend = registry.get(Family, family), registry.get(LibraryBackend, name)
    for layout in ("NN", "NT", "TN", "TT") if family == "dense" else ("TN",):
        stored = matrices(dtype, c="bf16", layout=layout, shared=shared)
        problem = plugin.problem(Problem(48, 128, 256, *stored, bias=bias, batch=5))
        operands = plugin.make_inputs(problem, "cuda")
        operands |= {"c": torch.empty(5, 48, 128, dtype=torch.bfloat16, device="cuda")}
        for config in [None, *backend.list_algorithms(problem, operands, 3)]:
            call = backend.operation(problem, operands, config)
            if call is None and family != "dense":
                pytest.skip("this PyTorch has no such product")
            assert call is not None

            def run() -> None:
                call()  # noqa: B023
                torch.cuda.synchronize()

            found = verify.verify(problem, plugin, run, operands["c"], plugin.reference(problem, operands))
            assert found.ok, f"{problem.key}: {found.reason}"
            replayed(call)


@pytest.fixture(scope="module")
def served() -> Problem:
    """A tuned batch, dense and in a range of M, loaded into the process's dispatcher."""
    problem = Problem(33, 136, 528, *matrices("bf16", layout="TN"), batch=6, bias="none")
    rows = [record(p, Config("tile", 32, 64, 64, 4, 2, 4, 2)) for p in (problem, replace(problem, bias="n"))]
    rows.append(record(replace(problem, m=64, batch=3), Config("tile", 32, 64, 64, 4, 1, 4, 2), m_from=1))
    assert tritongemm.load(rows) == 3
    return problem


def served_by(a: Tensor, b: Tensor, bias: Tensor | None = None) -> str:
    return tritongemm.explain("bmm", a, b, bias).partition(":")[0]


def close(found: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    wanted = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert verify.deviation(found, wanted) < 2**-7


def test_bmm_reads_operands_as_stored(served: Problem) -> None:
    b = normal(6, 136, 528).transpose(1, 2)
    shared = normal(136, 528).t().expand(6, 528, 136)
    heads = normal(33, 6, 544)[:, :, :528].transpose(0, 1)
    for a in (normal(6, 33, 528), heads):
        for weights in (b, shared):
            for bias in (None, normal(136), normal(6, 136), normal(6, 1, 136)):
                added = None if bias is None else bias.view(-1, 1, 136) if bias.dim() > 1 else bias
                assert served_by(a, weights, bias) == "exact"
                close(tritongemm.bmm(a, weights, bias), a, weights, added)
    out = torch.zeros(33, 6, 136, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    assert tritongemm.bmm(heads, b, out=out) is out
    close(out, heads, b)
    assert served_by(normal(6, 528, 33).transpose(1, 2), b) == "fallback"


def test_memory_for_the_result_is_written_under_torch_compile(served: Problem) -> None:
    """By the tuned kernel, which is one operation of the graph."""
    a, b, out = normal(6, 33, 528), normal(6, 136, 528).transpose(1, 2), normal(6, 33, 136)
    compiled = torch.compile(lambda a, b, out: tritongemm.bmm(a, b, out=out), fullgraph=True)
    compiled(a, b, out)
    assert torch.equal(out, tritongemm.bmm(a, b))


@pytest.mark.parametrize("m", [1, 7, 33, 64])
def test_a_range_of_m_serves_each(served: Problem, m: int) -> None:
    a, b = normal(3, m, 528), normal(3, 136, 528).transpose(1, 2)
    assert served_by(a, b) == ("exact" if m == 64 else "range")
    close(tritongemm.bmm(a, b), a, b)


def test_graphs_and_compiled_code(served: Problem) -> None:
    a, b = normal(6, 33, 528), normal(6, 136, 528).transpose(1, 2)
    tritongemm.bmm(a, b)
    graph, found = graph_of(tritongemm.bmm, a, b)
    a.copy_(normal(6, 33, 528))
    graph.replay()
    close(found, a, b)
    compiled = torch.compile(lambda x, w: tritongemm.bmm(x, w) * 2, fullgraph=True)
    with torch.no_grad():
        close(compiled(a, b) / 2, a, b)


def test_an_untuned_batch_is_pytorchs(served: Problem) -> None:
    a, b = normal(6, 34, 528), normal(6, 136, 528).transpose(1, 2)
    assert served_by(a, b) == "fallback" and torch.equal(tritongemm.bmm(a, b), torch.bmm(a, b))
    assert default_dispatcher().device(a.get_device()) is not None

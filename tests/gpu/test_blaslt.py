"""The BLASLt backend on a real GPU: every layout, bias and dtype against float64, algorithms, graphs and streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from tests.gpu.here import DENSE, VENDOR, needs_gpu, nvidia
from tritongemm.backends.blaslt import algorithms
from tritongemm.core.config import Config
from tritongemm.core.operands import Operands
from tritongemm.core.problem import Problem, matrices
from tritongemm.numerics import verify
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend

pytestmark = needs_gpu
BLASLT = registry.get(LibraryBackend, "blaslt")
FP8 = ("fp8e4m3fn", "fp8e4m3fn")
Tensors: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]"  # A, B, the bias, C


def made(problem: Problem) -> Tensors:
    given = DENSE.make_inputs(problem, "cuda")
    c = torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.c.type.torch), device="cuda")
    return given["a"], given["b"], given.get("bias"), c


def named(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor) -> Operands:
    """The operands as backends take them."""
    return {"a": a, "b": b, "c": c} | ({} if bias is None else {"bias": bias})


def operation(problem: Problem, operands: Tensors, config: Config | None = None) -> Callable[[], object]:
    """The call of an algorithm that the library must have."""
    call = BLASLT.operation(problem, named(*operands), config)
    assert call is not None, f"no algorithm for {problem.key}"
    return call


def check(problem: Problem, config: Config | None = None, operands: Tensors | None = None) -> None:
    a, b, bias, c = operands or made(problem)
    call = operation(problem, (a, b, bias, c), config)

    def run() -> None:
        call()
        torch.cuda.synchronize()

    found = verify.verify(problem, DENSE, run, c, DENSE.reference(problem, named(a, b, bias, c)))
    assert found.ok, f"{problem.key}: {found.reason}"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bias", ["none", "n", "m"])
@pytest.mark.parametrize(("row_a", "row_b"), list(itertools.product([True, False], repeat=2)))
def test_layouts_and_biases(dtype: str, bias: str, row_a: bool, row_b: bool) -> None:
    for m, n, k in ((128, 256, 192), (16, 40, 72), (1, 96, 64)):
        check(Problem(m, n, k, *matrices(dtype, layout="NT"[row_a] + "NT"[row_b]), bias=bias))


@nvidia
@pytest.mark.skipif(not VENDOR or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 units")
@pytest.mark.parametrize("out", ["fp16", "bf16", "fp32", "fp8e4m3fn"])
def test_fp8_in_every_output(out: str) -> None:
    for bias in ("none",) if out == "fp8e4m3fn" else ("none", "n"):
        problem = Problem(64, 256, 512, *matrices(*FP8, out, layout="TN"), bias=bias)
        check(problem)
        operands = made(problem)
        configs = BLASLT.list_algorithms(problem, named(*operands))
        assert {c.option("fast") for c in configs} == {0, 1}
        for config in (configs[0], configs[-1]):
            check(problem, config, operands)
    row = Problem(64, 256, 512, *matrices(*FP8, out))
    assert BLASLT.operation(row, named(*made(row))) is None  # not TN


def test_int8_and_mixed_types() -> None:
    check(Problem(64, 256, 512, *matrices("int8", c="int32", layout="TN")))
    check(Problem(64, 256, 512, *matrices("int8", c="int32", layout="TN"), bias="n"))
    check(Problem(64, 256, 512, *matrices(c="fp32", layout="TN")))
    mixed = Problem(64, 256, 512, *matrices(b="bf16", c="fp32"))
    assert BLASLT.operation(mixed, named(*made(mixed))) is None


def test_every_algorithm_is_right_and_finds_its_way_back() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"), bias="n")
    operands = made(problem)
    configs = BLASLT.list_algorithms(problem, named(*operands))
    assert len(configs) > 1 and len({algorithms.identity(c) for c in configs}) == len(configs)
    assert all(Config.parse(c.name) == c for c in configs)
    for config in configs[:: max(1, len(configs) // 64)]:
        check(problem, config, operands)
    assert algorithms.resolve(configs[-1], problem, algorithms.version()) is configs[-1]
    assert algorithms.resolve(configs[-1], problem, 1) == configs[-1]  # found again by what it is
    gone = Config.parse(configs[0].name.replace("__tile", "__tile9"))
    assert gone is not None and algorithms.resolve(gone, problem, 1) is None


@nvidia  # hipBLASLt's indices need no rebuilding
def test_algorithms_are_rebuilt_from_their_attributes() -> None:
    problem = Problem(256, 1280, 2048, *matrices("bf16", layout="TN"))
    operands = made(problem)
    prepared = algorithms._prepared(problem, named(*operands), False)
    assert prepared is not None
    plan, _ = prepared
    same = 0
    for algorithm in plan.algorithms:
        again = plan.rebuild(dict(algorithm.values))
        same += again is not None and again.values == algorithm.values
        if again is not None:
            c = operands[3].fill_(float("nan"))
            args = (operands[1].data_ptr(), operands[0].data_ptr(), c.data_ptr(), c.data_ptr())
            plan.prepare(again, *args)(algorithms._workspace(c.device, 0).data_ptr(), 0)
            torch.cuda.synchronize()
            assert verify.deviation(c, DENSE.reference(problem, named(*operands))) <= DENSE.tolerance(problem)
    print(f"rebuilt {same} of {len(plan.algorithms)}")
    assert same >= len(plan.algorithms) // 2


def test_graphs_streams_and_operands_that_are_not_aligned() -> None:
    problem = Problem(64, 128, 256, *matrices("bf16", layout="TN"), bias="m")
    a, b, bias, c = made(problem)
    call = operation(problem, (a, b, bias, c))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert verify.deviation(c, DENSE.reference(problem, named(a, b, bias, c))) <= DENSE.tolerance(problem)
    odd = Problem(33, 7, 13, *matrices("bf16"))
    flat = torch.randn(33 * 13 + 1, device="cuda", dtype=torch.bfloat16)
    a, b, _, c = made(odd)
    check(odd, None, (flat[1:].view(33, 13), b, None, c))

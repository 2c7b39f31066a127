"""The time of quantising A, experts and fp8 layers of transformers, on a real GPU."""

from typing import Any

import pytest
import torch
from torch import nn

import tritongemm
from tests.gpu.here import fp8, needed_fp8, record, replayed
from tests.support.nouns import Config, Family, Machine, Problem, matrices, registry
from tests.support.patched_layers import HIDDEN, experts, fp8_experts, rows_of_experts, tokens
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.numerics import verify
from tritongemm.tune import quantization

GROUPED = Config("grouped", 16, 64, 128, 1, 1, 4, 2, (("per_unit", 1),))


@pytest.mark.parametrize(("m", "k"), [(1, 7168), (13, 321), (200, 16384)])
@pytest.mark.parametrize(
    ("family", "scales"),
    [
        ("a8w8", ""),
        ("a8w8", "tensor"),
        ("a8w8_blockscale", ""),
        ("a8w8_blockscale", "block_rows"),
        ("a8w8_blockscale", "mx"),
        ("a4w4_blockscale", ""),
    ],
)
def test_quantising_is_timed(gpu: GpuEvaluator, family: str, scales: str, m: int, k: int) -> None:
    dtype = fp8(gpu.target) if scales != "mx" else "fp8e4m3fn"
    if family == "a4w4_blockscale":
        dtype, k = "fp4e2m1", k + k % 2
    problem = registry.get(Family, family).problem(Problem(m, 256, k, *matrices(dtype, c="bf16", layout="TN")), scales)
    asked = quantization.quantization_of(problem)
    assert asked is not None and gpu.times_quantization
    found = gpu.time_quantization(problem, quantization._launches(asked, gpu.target))
    assert found is not None and found > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("m", "k"), [(1, 8321), (5, 17000), (300, 2048)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_factor_of_what_is_no_number_is_nan(
    gpu_machine: Machine, dtype: torch.dtype, m: int, k: int, value: float
) -> None:
    if dtype != torch.int8 and gpu_machine.target.fp8 != "fn":
        pytest.skip("another encoding of fp8")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    x[m // 2, k // 3] = value
    for granularity in ("tensor", "row", "block"):
        _, scale = tritongemm.quantize(x, granularity, dtype)
        _, factors = tritongemm.quantize(x.cpu(), granularity, dtype)
        assert bool(factors.isnan().any()) and torch.equal(scale.cpu().nan_to_num(-1), factors.nan_to_num(-1))


@pytest.mark.usefixtures("dispatcher")
def test_experts_are_served(gpu_machine: Machine) -> None:
    kinds = [False, True] if gpu_machine.target.fp8 == "fn" else [False]
    model = nn.ModuleDict({"bf16": experts(), "fp8": fp8_experts(experts())}).cuda()
    given = [tensor.cuda() for tensor in tokens()]
    wanted = model["bf16"](*given)

    patched: Any = tritongemm.patch(
        model, [record(one.problem, GROUPED) for is_fp8 in kinds for one in rows_of_experts(is_fp8)]
    )
    assert len(patched.patched) == len(kinds)
    for name in patched.patched:
        model[name](*given)
        out = replayed(model[name], *given)
        assert out.shape == (given[0].shape[0], HIDDEN)
        assert (out.float() - wanted.float()).norm() < (0.1 if name == "fp8" else 0.02) * wanted.float().norm()


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.usefixtures("dispatcher")
def test_rows_decide_whether_a_layer_quantises(gpu_machine: Machine, scales: str) -> None:
    """At M 16 the rows say that bf16 is the faster one, at M 64 that fp8 is; in a graph too."""
    n, k, name = 256, 512, needed_fp8(gpu_machine.target)
    family = registry.get(Family, "a8w8" if scales == "row" else "a8w8_blockscale")
    tile, rows = Config("tile", 64, 64, 128, 4, 1, 4, 2), []
    for m, seconds in ((16, 7e-6), (64, 9e-6)):
        quantised = family.problem(Problem(m, n, k, *matrices(name, c="bf16", layout="TN")), scales)
        entire = Problem(m, n, k, *matrices("bf16", layout="TN"))
        rows.append(record(quantised, tile, seconds=5e-6, quantize_seconds=3e-6))
        rows.append(record(entire, tile, seconds=seconds))
    assert tritongemm.load(rows) == len(rows)
    w, factors = tritongemm.quantize(torch.randn(n, k, device="cuda"), "row" if scales == "row" else "tensor")
    factors = factors.flatten() if scales == "row" else factors.repeat(n // 128, k // 128)
    spread = factors[:, None] if scales == "row" else factors[0, 0]
    unquantized = (w.float() * spread).bfloat16()
    for m, word in ((16, "unquantised"), (64, "quantised")):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        reported = tritongemm.explain("linear_fp8", x, w, factors, unquantized=unquantized).splitlines()
        assert reported[0].startswith(f"{word}: ") and reported[1].startswith("exact: ")
        tritongemm.linear_fp8(x, w, factors, unquantized=unquantized)
        out = replayed(tritongemm.linear_fp8, x, w, factors, unquantized=unquantized)
        entire_product = tritongemm.mm(x, unquantized)
        assert torch.equal(out, entire_product) == (m == 16)
        if word == "quantised":
            quantised, factor = tritongemm.quantize(x, scales)
            x = quantised.double() * factor.double().repeat_interleave(k // factor[0].numel(), -1).reshape(m, k)
        # The weights of bf16 were rounded once more than those of fp8 times their factors.
        assert verify.deviation(out, x.double() @ unquantized.double().T) < 0.02

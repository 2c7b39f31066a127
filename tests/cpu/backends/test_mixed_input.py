"""Others' products by int4 compute what the family means: PyTorch's, and stand-ins of vLLM's."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritongemm.core.problem import Problem, matrices
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.search_spaces.loader import load_target

FAMILY, BACKEND = registry.get(Family, "a16w4"), registry.get(LibraryBackend, "mixed_input")


def words_as_numbers(words: Tensor) -> Tensor:
    """The numbers [K, N] of int32 [K / 8, N]."""
    return torch.stack([words >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1)


def multiplied(a: Tensor, words: Tensor, factors: Tensor, zeros: Tensor) -> Tensor:
    each = words.shape[0] * 8 // factors.shape[0]
    weight = (words_as_numbers(words) - zeros.repeat_interleave(each, 0)) * factors.repeat_interleave(each, 0)
    return a.double().matmul(weight.double()).to(a.dtype)


def marlin_gemm(
    a: Tensor, c: Tensor, b_q_weight: Tensor, b_bias: None, b_scales: Tensor, a_scales: None, global_scale: None,
    b_zeros: Tensor, g_idx: Tensor, perm: Tensor, workspace: None, b_q_type: str, size_m: int, size_n: int, size_k: int,
    is_k_full: bool = True, use_atomic_add: bool = False, use_fp32_reduce: bool = False, is_zp_float: bool = False,
) -> Tensor:  # fmt: skip
    """As vLLM's, of a weight, factors and zero points that are not permuted."""
    assert (b_q_weight.shape, b_scales.shape[1], size_m) == ((size_k // 8, size_n), size_n, a.shape[0])
    zeros = torch.full_like(b_scales, 8.0) if b_q_type == "uint4b8" else b_zeros
    return c.copy_(multiplied(a, b_q_weight, b_scales, zeros))


def machete_mm(
    a: Tensor, b_q: Tensor, b_type: str, b_group_scales: Tensor, b_group_zeros: Tensor, b_group_size: int
) -> Tensor:
    """As vLLM's, of a weight that is not put into another order."""
    assert b_q.stride() == (1, b_q.shape[0]) and b_group_size == b_q.shape[0] * 8 // b_group_scales.shape[0]
    zeros = torch.full_like(b_group_scales, 8.0) if b_type == "uint4b8" else -b_group_zeros / b_group_scales
    return multiplied(a, b_q, b_group_scales, zeros)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **functions: Any) -> None:
        made = ModuleType(name)
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, name, made)

    types = SimpleNamespace(uint4="uint4", uint4b8="uint4b8")
    module("vllm.scalar_type", scalar_types=types)
    module(
        "vllm._custom_ops", marlin_gemm=marlin_gemm, machete_mm=machete_mm,
        gptq_marlin_repack=lambda words, perm, size_k, size_n, num_bits: words,
        machete_prepack_B=lambda words, a_type, b_type, group_scales_type: words,
    )  # fmt: skip
    module(
        "vllm.model_executor.layers.quantization.utils.marlin_utils",
        marlin_permute_scales=lambda s, size_k, size_n, group_size: s, marlin_zero_points=lambda zeros, *sizes: zeros,
        marlin_make_workspace_new=lambda device: None,
    )  # fmt: skip
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        module(parent)
    for parent in ("quantization", "quantization.utils"):
        module(f"vllm.model_executor.layers.{parent}")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("scales", "order"), [("weight_128", "plain"), ("weight_64_zeros", "halves_32")])
def test_they_compute_what_the_family_means(scales: str, order: str) -> None:
    plain = Problem(5, 64, 512, *matrices("bf16", "int4", "bf16", layout="TN", order=order))
    problem = FAMILY.problem(plain, scales)
    assert BACKEND.supports(problem, load_target("sm90"))
    operands = FAMILY.make_inputs(problem, "cpu") | {"c": torch.empty(5, 64, dtype=torch.bfloat16)}
    exact = FAMILY.reference(problem, operands)
    found = BACKEND.list_algorithms(problem, operands)
    assert [config.template for config in found] == ["int4pack", "marlin", "machete"]
    for config in found:
        call = BACKEND.operation(problem, operands, config)
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2e-2, config.template
        moved = operands | {"c": operands["c"].clone(), "scale_b": operands["scale_b"].roll(1, 0)}
        call = BACKEND.operation(problem, moved, config)
        assert call is not None
        call()
        assert deviation(moved["c"], exact) > 0.1


def test_what_they_do_not_compute_is_said() -> None:
    plain = FAMILY.problem(Problem(5, 64, 512, *matrices("bf16", "int4", "bf16", layout="TN")), "weight_128")
    assert "adds no bias" in BACKEND.supports(replace(plain, bias="n"), load_target("sm90")).reason
    fp4 = FAMILY.problem(replace(plain, b=plain.b._replace(dtype="fp4e2m1")))
    assert "by int4, not bf16-fp4e2m1-bf16" in BACKEND.supports(fp4, load_target("sm90")).reason
    operands = FAMILY.make_inputs(plain, "cpu") | {"c": torch.empty(5, 64, dtype=torch.bfloat16)}
    assert [config.template for config in BACKEND.list_algorithms(plain, operands)] == ["int4pack"]  # without vLLM

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.support import scaled_operands
from tests.support.fakes import scaled_products
from tests.support.kernel_cases import GFX942, SM90, SPLIT
from tests.support.linear_layers import problem
from tests.support.nouns import Operand, Patch, Problem, Scaling, each, load_target, matrices, registry
from tests.support.scaled_operands import PAIRS
from tritongemm.backends._scales import coverage
from tritongemm.backends.torch import backend as torch_backend
from tritongemm.backends.torch.backend import single, two_steps
from tritongemm.codegen import render
from tritongemm.numerics import epilogues
from tritongemm.numerics.verify import deviation
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend

BACKEND = registry.get(LibraryBackend, "torch")
ALONG_K = [name for name, pair in PAIRS.items() if pair[0].depth]


@pytest.fixture
def hopper(monkeypatch: Patch) -> None:
    """PyTorch's block-scaled product, which this machine's does not have."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_products.scaled_mm)

    def into(a: Any, b: Any, of_a: Any, kind_a: Any, _: Any, of_b: Any, kind_b: Any, *rest: Any, out: Any) -> Any:
        kinds = torch.nn.functional.ScalingType
        return out.copy_(
            scaled_products.scaled_mm(a, b, of_a[0], kinds(*kind_a), of_b[0], kinds(*kind_b), output_dtype=rest[2])
        )

    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "out", into, raising=False)


@each("pair", ALONG_K)
@each(("m", "n", "k"), [(1, 48, 384), (33, 272, 640), (64, 128, 128), (130, 144, 512)])
def test_factors_along_k_are_stored_as_pytorch_wants_them(hopper: None, pair: str, m: int, n: int, k: int) -> None:
    problem = scaled_operands.problem(m, n, k, PAIRS[pair])
    operands, exact = scaled_operands.operands(problem)
    call = BACKEND.operation(problem, operands)
    assert call is not None
    result: Any = call()
    assert deviation(result, exact) < 2**-7
    assert bool(operands["c"].isnan().all())  # a user's call makes its own C
    (config,) = BACKEND.list_algorithms(problem, operands)
    writing = BACKEND.operation(problem, operands, config)
    assert writing is not None
    writing()
    assert deviation(operands["c"], exact) < 2**-7


def test_copies_are_made_before_the_call_and_only_where_they_must(hopper: None) -> None:
    problem = scaled_operands.problem(64, 256, 512, PAIRS["block, A in groups"])
    operands, exact = scaled_operands.operands(problem)
    call: Any = BACKEND.operation(problem, operands)
    operands["scale_a"].mul_(2)  # read as stored: the call sees what changed
    assert deviation(call(), 2 * exact) < 2**-7
    rows = scaled_operands.problem(64, 256, 512, PAIRS["block, A in rows"])
    operands, exact = scaled_operands.operands(rows)
    call = BACKEND.operation(rows, operands)
    operands["scale_a"].mul_(2)
    assert deviation(call(), exact) < 2**-7


def test_what_this_pytorch_refuses_or_has_no_function_for() -> None:
    problem = scaled_operands.problem(33, 64, 256, PAIRS["block, A in groups"])
    operands, _ = scaled_operands.operands(problem)
    assert BACKEND.operation(problem, operands) is None  # PyTorch has it on Hopper alone
    assert BACKEND.list_algorithms(problem, operands) == []
    block = scaled_operands.problem(33, 64, 256, PAIRS["block, A in rows"])
    assert torch_backend.function(block) == "scaled_mm" and BACKEND.torch_function(block) == ""
    for other in (
        replace(block, c=Operand("fp8e4m3fn")),
        replace(block, bias="n"),
        replace(block, n=40),
        replace(block, b=block.b._replace(order="shuffled_16x16")),
        replace(block, b=block.b._replace(scaling=Scaling(rows=64, depth=128))),
        replace(block, b=block.b._replace(scaling=None)),
    ):
        assert torch_backend.function(other) == ""
    assert coverage(replace(block, b=block.b._replace(scaling=None))) == "other"
    assert coverage(block.scaled((None, None))) == ""


@each("pair", ["tensor", "row"])
def test_factors_of_rows_and_both_ways_to_sum(monkeypatch: Patch, pair: str) -> None:
    asked = []

    def product(
        a: Any, b: Any, of_a: Any, of_b: Any, *, bias: Any, out_dtype: Any, use_fast_accum: bool, out: Any = None
    ) -> Any:
        asked.append(use_fast_accum)
        one = of_a.numel() == of_b.numel() == 1
        assert one or (of_a.shape == (a.shape[0], 1) and of_b.shape == (1, b.shape[1]) and of_b.is_contiguous())
        c = (a.double() @ b.double() * of_a * of_b + (0 if bias is None else bias.double())).to(out_dtype)
        return c if out is None else out.copy_(c)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    problem = scaled_operands.problem(33, 48, 80, PAIRS[pair], bias="n")
    operands, exact = scaled_operands.operands(problem)
    result: Any = BACKEND.operation(problem, operands)
    assert deviation(result(), exact) < 2**-7
    assert not any(asked)  # as a user calls it who says nothing
    configs = BACKEND.list_algorithms(problem, operands)
    assert [c.option("fast") for c in configs] == [0, 1]
    for config in configs:
        operands["c"].fill_(float("nan"))
        call = BACKEND.operation(problem, operands, config)
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2**-7
    assert asked[-1]


@each("bias", ["none", "m", "n"])
@each("pair", ["tensor", "row"])
def test_integers_are_scaled_after_an_exact_product(pair: str, bias: str) -> None:
    problem = scaled_operands.problem(33, 48, 80, PAIRS[pair], "int8", bias=bias)
    operands, exact = scaled_operands.operands(problem)
    call = BACKEND.operation(problem, operands)
    assert call is not None and torch_backend.function(problem) == "_int_mm"
    call()
    assert deviation(operands["c"], exact) < 2**-7
    assert BACKEND.torch_function(problem) == ""  # a generated module calls what it can alone
    assert torch_backend.function(replace(problem, m=16)) == ""


BATCH = Problem(5, 7, 9, *matrices("fp32", layout="TN"), batch=3)
DENSE = registry.get(Family, "dense")


@each("shared", ["", "a", "b"])
@each(("row_a", "bias"), [(True, "none"), (False, "none"), (True, "n"), (True, "m")])
def test_pytorch_computes_a_batch_as_its_users_do(shared: str, row_a: bool, bias: str) -> None:
    problem = replace(
        BATCH,
        bias=bias,
        a=BATCH.a._replace(row_major=row_a, shared=shared == "a"),
        b=BATCH.b._replace(shared=shared == "b"),
    )
    torch_backend = registry.get(LibraryBackend, "torch")
    assert torch_backend.supports(problem, SM90)
    operands = DENSE.make_inputs(problem, "cpu") | {"c": torch.full((3, 5, 7), float("nan"))}
    call = torch_backend.operation(problem, operands)
    assert call is not None
    call()
    assert deviation(operands["c"], DENSE.reference(problem, operands)) < 1e-6


def test_which_function_a_generated_module_calls_and_why_none() -> None:
    baseline = registry.baseline()
    assert baseline.torch_function(BATCH) == "bmm" and baseline.torch_function(replace(BATCH, bias="n")) == "baddbmm"
    text = render.module(
        replace(BATCH, bias="n", b=BATCH.b._replace(shared=True)), [SPLIT], SM90, 0.1, 1.0, library="baddbmm"
    )
    assert "torch.baddbmm(bias[:, None], a, b.expand(BATCH, K, N), out=c)" in text
    problem = registry.get(Family, "a8w8").problem(
        Problem(32, 32, 32, *matrices("fp8e4m3fn", c="bf16", layout="TN"), batch=2)
    )
    assert "where each has its own" in registry.get(Backend, "blaslt").supports(problem, SM90).reason
    plain = A16W4.problem(Problem(5, 64, 512, *matrices("bf16", "int4", "bf16", layout="TN")), "weight_128")
    assert "adds no bias" in MIXED.supports(replace(plain, bias="n"), load_target("sm90")).reason
    fp4 = A16W4.problem(replace(plain, b=plain.b._replace(dtype="fp4e2m1")))
    assert "by int4, not bf16-fp4e2m1-bf16" in MIXED.supports(fp4, load_target("sm90")).reason
    operands = A16W4.make_inputs(plain, "cpu") | {"c": torch.empty(5, 64, dtype=torch.bfloat16)}
    assert [config.template for config in MIXED.list_algorithms(plain, operands)] == ["int4pack"]  # without vLLM


@each("rows", [5, 12])
def test_batches_that_pytorch_has_no_function_for(rows: int) -> None:
    problem = replace(
        BATCH, m=rows, n=8, k=8, a=BATCH.a._replace(dtype="int8"), b=BATCH.b._replace(dtype="int8"), c=Operand("int32")
    )
    torch_backend = registry.get(LibraryBackend, "torch")
    assert "no function" in torch_backend.supports(problem, GFX942).reason
    assert torch_backend.operation(problem, {}) is None and not torch_backend.torch_function(problem)


@each("shared", ["", "a", "b"])
@each(("family", "bias"), [("a8w8", "none"), ("a8w8", "n"), ("a8w8", "m"), ("dense", "none")])
def test_eight_bits_are_multiplied_one_product_after_another(family: str, bias: str, shared: str) -> None:
    """PyTorch has no batched product of them; where B is shared and nothing added, one call computes all rows."""
    plugin: Family = registry.get(Family, family)
    result = "fp32" if family == "a8w8" else "int32"
    problem = plugin.problem(
        Problem(24, 16, 32, *matrices("int8", c=result, layout="TN", shared=shared), bias=bias, batch=3)
    )
    torch_backend = registry.get(LibraryBackend, "torch")
    assert torch_backend.supports(problem, SM90) and not torch_backend.torch_function(problem)
    assert single(problem).m == (72 if shared == "b" and bias == "none" else 24)
    operands = plugin.make_inputs(problem, "cpu")
    c = torch.full((3, 24, 16), -1).to(getattr(torch, problem.c.type.torch))
    for config in (None, *torch_backend.list_algorithms(problem, operands | {"c": c})):
        c.fill_(-1)
        call = torch_backend.operation(problem, operands | {"c": c}, config)
        assert call is not None
        call()
        assert deviation(c, plugin.reference(problem, operands)) < 1e-6


@each("backend", ["ck", "cutlass", "asm"])
def test_a_library_of_single_products_says_so(backend: str) -> None:
    target = SM90 if backend == "cutlass" else GFX942
    reason = (
        registry.get(Backend, backend)
        .supports(
            replace(BATCH, a=BATCH.a._replace(dtype="bf16"), b=BATCH.b._replace(dtype="bf16"), c=Operand("bf16")),
            target,
        )
        .reason
    )
    assert "not batched ones" in reason


A16W4, MIXED = registry.get(Family, "a16w4"), registry.get(LibraryBackend, "mixed_input")


def multiplied(a: Tensor, words: Tensor, factors: Tensor, zeros: Tensor) -> Tensor:
    each = words.shape[0] * 8 // factors.shape[0]
    numbers = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1)
    weight = (numbers - zeros.repeat_interleave(each, 0)) * factors.repeat_interleave(each, 0)
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
def vllm(monkeypatch: Patch) -> None:
    def module(name: str, **functions: Any) -> None:
        made = ModuleType(name)
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, name, made)

    module("vllm.scalar_type", scalar_types=SimpleNamespace(uint4="uint4", uint4b8="uint4b8"))
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
    problem = A16W4.problem(Problem(5, 64, 512, *matrices("bf16", "int4", "bf16", layout="TN", order=order)), scales)
    assert MIXED.supports(problem, load_target("sm90"))
    operands = A16W4.make_inputs(problem, "cpu") | {"c": torch.empty(5, 64, dtype=torch.bfloat16)}
    exact = A16W4.reference(problem, operands)
    found = MIXED.list_algorithms(problem, operands)
    assert [config.template for config in found] == ["int4pack", "marlin", "machete"]
    for config in found:
        call = MIXED.operation(problem, operands, config)
        assert call is not None
        call()
        assert deviation(operands["c"], exact) < 2e-2, config.template
        moved = operands | {"c": operands["c"].clone(), "scale_b": operands["scale_b"].roll(1, 0)}
        call = MIXED.operation(problem, moved, config)
        assert call is not None
        call()
        assert deviation(moved["c"], exact) > 0.1


def test_what_follows_a_product_is_compiled_once_for_all_rows(monkeypatch: Patch) -> None:
    counter, compile_by = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **more: compile_by(step, backend=counter, **more))
    for m in (64, 16, 7):
        of = replace(problem(m, 32, 16), epilogue="silu_mul")
        a, b, c = torch.randn(m, 16).bfloat16(), torch.randn(32, 16).bfloat16(), torch.empty(m, 16).bfloat16()
        call = two_steps(
            of, {"a": a, "b": b, "c": c}, lambda _, given: partial(torch.mm, given["a"], given["b"].mT, out=given["c"])
        )
        assert call is not None
        call()
        torch.testing.assert_close(c, epilogues.apply("silu_mul", (a @ b.mT).float()).bfloat16())
    assert counter.frame_count == 1

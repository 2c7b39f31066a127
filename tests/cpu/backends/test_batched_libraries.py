"""PyTorch's batched products against float64, and which of them there are."""

from dataclasses import replace

import torch

from tests.support.kernel_cases import GFX942, SM90, SPLIT
from tests.support.tables import each
from tritongemm.backends.torch.backend import single
from tritongemm.codegen import render
from tritongemm.core.problem import Operand, Problem, matrices
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, Family, LibraryBackend

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


def test_which_function_a_generated_module_calls() -> None:
    baseline = registry.baseline()
    assert baseline.torch_function(BATCH) == "bmm" and baseline.torch_function(replace(BATCH, bias="n")) == "baddbmm"
    text = render.module(
        replace(BATCH, bias="n", b=BATCH.b._replace(shared=True)), [SPLIT], SM90, 0.1, 1.0, library="baddbmm"
    )
    assert "torch.baddbmm(bias[:, None], a, b.expand(BATCH, K, N), out=c)" in text


@each("rows", [5, 12])
def test_what_pytorch_has_no_function_for(rows: int) -> None:
    """Of int8 it wants more than 16 rows."""
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


def test_the_vendors_library_says_why_it_has_no_factors_of_a_batch() -> None:
    problem = registry.get(Family, "a8w8").problem(
        Problem(32, 32, 32, *matrices("fp8e4m3fn", c="bf16", layout="TN"), batch=2)
    )
    assert "where each has its own" in registry.get(Backend, "blaslt").supports(problem, SM90).reason


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

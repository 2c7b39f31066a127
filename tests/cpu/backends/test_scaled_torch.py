"""PyTorch's scaled products: which function a problem has, and its factors in the order in which PyTorch reads them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import scaled_operands
from tests.support.fakes import scaled_products
from tests.support.scaled_operands import PAIRS
from tests.support.tables import each
from tritongemm.backends._scales import coverage
from tritongemm.backends.torch import backend as torch_backend
from tritongemm.core.problem import Operand
from tritongemm.core.scaling import Scaling
from tritongemm.numerics.verify import deviation
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend

BACKEND = registry.get(LibraryBackend, "torch")
ALONG_K = [name for name, pair in PAIRS.items() if pair[0].depth]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_this_pytorch_refuses_is_none() -> None:
    problem = scaled_operands.problem(33, 64, 256, PAIRS["block, A in groups"])
    operands, _ = scaled_operands.operands(problem)
    assert BACKEND.operation(problem, operands) is None  # PyTorch has it on Hopper alone
    assert BACKEND.list_algorithms(problem, operands) == []


@each("pair", ["tensor", "row"])
def test_factors_of_rows_and_both_ways_to_sum(monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
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


def test_what_pytorch_has_no_function_for() -> None:
    block = scaled_operands.problem(33, 64, 256, PAIRS["block, A in rows"])
    assert torch_backend.function(block) == "scaled_mm"
    assert BACKEND.torch_function(block) == ""
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

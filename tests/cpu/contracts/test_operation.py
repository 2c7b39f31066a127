from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.linear_layers import ComputingKernel, attach_device, be_a_gpu, problem, record
from tests.support.nouns import Defaults, InputError, Patch, Support, refuses, sizes
from tests.support.operation_calls import PLAIN, SCALED, Call, Rows
from tests.support.plugins import dropped
from tritongemm.operations import contract
from tritongemm.operations.contract import Operation, ProductOperation

OPERATIONS = {name for one in contract.every() for name in (one.name, *one.calls)}
MADE = {name: make(Rows(5, wide=torch.float32)) for name, make in (PLAIN | SCALED).items()}
CALLS = {name: call for name, call in MADE.items() if call.name in OPERATIONS and "out" not in call.named}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def test_every_operation_has_a_case_and_what_is_no_call_is_refused() -> None:
    assert {call.name for call in CALLS.values()} == OPERATIONS
    with pytest.raises(InputError, match="no operation is called 'conv'; there are: bmm, fused_moe, grouped_mm"):
        tritongemm.explain("conv", torch.ones(2, 2))
    with pytest.raises(AttributeError, match="has no attribute 'conv'"):
        tritongemm.conv  # noqa: B018


@every_call
def test_operands_are_those_of_the_schema(call: Call) -> None:
    operation, given = contract.bind(call.name, call.given, call.named)
    listed = [x.split("=")[0].split()[-1] for x in operation.schema.partition("(")[2].rpartition(")")[0].split(", ")]
    assert list(given._fields)[: len(listed)] == listed and set(given._fields[len(listed) :]) <= {
        *given._field_defaults
    }


@every_call
def test_it_is_inferred_read_and_computed_alike(call: Call) -> None:
    operation, given = contract.bind(call.name, call.given, call.named)
    result = operation.fallback(operation.check(given))
    assert torch.equal(result, operation.fallback(operation.check(given)))
    made = call()
    rows = made if isinstance(made, Tensor) else made[0]  # factors behind it
    torch.testing.assert_close(rows.float(), result[: len(rows)].float(), rtol=2e-2, atol=0.5)
    with FakeTensorMode() as mode:
        inferred = operation.infer(type(given)(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in given)))
    assert (inferred.shape, inferred.dtype) == (result.shape, result.dtype)
    bare = type(given)(*(t.to("meta") if isinstance(t, Tensor) else t for t in given))
    for (product, checked), (_, without) in zip(operation.products(given), operation.products(bare), strict=True):
        reading, same = product.read(checked), product.read(without)
        assert not isinstance(reading, Support) and not isinstance(same, Support)
        assert reading.problems and reading.problems == same.problems and reading.result == same.result
        if product is operation:
            assert reading.result == (tuple(result.shape), result.dtype)
            wanted = set(reading.problems[0].operands) - {"c"}
            assert operation.name == "linear_fp8" or reading.tensors.keys() == wanted


@every_call
def test_it_is_captured_as_what_is_looked_up(call: Call, tmp_path: Path) -> None:
    operation, given = contract.bind(call.name, call.given, call.named)
    with torch.no_grad(), tritongemm.capture(tmp_path / "shapes.yaml"):
        getattr(tritongemm, call.name)(*call.given, **call.named)  # a capture puts others in their place
    rows = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    read = [product.read(checked) for product, checked in operation.products(given)]
    wanted = [one.problems for one in read if not isinstance(one, Support)]
    assert len(rows) == len(wanted) and all(row.operation == f"tritongemm.{call.name}" for row in rows)
    for row, problems in zip(rows, wanted, strict=True):
        problem = row.problem  # whose rows of groups are spread as they were
        assert problem in [
            one.spread_as(problem) if problem.groups and problem.groups.counts else one for one in problems
        ]


@every_call
def test_it_is_explained_by_function_and_by_name(call: Call) -> None:
    said = tritongemm.explain(call.name, *call.given, **call.named)
    assert said == tritongemm.explain(call.function, *call.given, **call.named)
    lines = [line for line in said.splitlines() if not line.startswith("quantised: ")]
    assert len(lines) == (2 if call.name == "fused_moe" else 1)
    assert all(line.startswith("fallback: ") and line.endswith("on cpu; tuned kernels run on a GPU") for line in lines)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: Patch) -> Iterator[ProductOperation]:
    with dropped(Operation, "gram", tmp_path, monkeypatch):
        operation, _ = contract.bind("gram", [torch.ones(1, 1)], {})
        assert isinstance(operation, ProductOperation)
        yield operation


def test_an_added_file_is_called_and_explained(toy: ProductOperation, tmp_path: Path, monkeypatch: Patch) -> None:
    x = torch.randn(6, 20)
    torch.testing.assert_close(tritongemm.gram(x), x @ x.T)
    compiled = torch.compile(lambda x: tritongemm.gram(x) + 1, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x @ x.T + 1)
    (gradient,) = torch.autograd.grad(tritongemm.gram(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach().sum(0).expand_as(x))
    x = x.detach()
    refuses(r"x \(6,\) must be \[M, K\]", tritongemm.gram, x[:, 0])
    with tritongemm.capture(tmp_path / "shapes.yaml"):
        tritongemm.gram(x)
        torch.ops.tritongemm.gram(x)
    (row,) = sizes.from_file(tmp_path / "shapes.yaml", Defaults())
    tuned = problem(6, 6, 20, dtype="fp32")
    assert (row.problem, row.operation, row.count) == (tuned, "tritongemm.gram", 2)
    dispatcher, kernel = be_a_gpu(monkeypatch), ComputingKernel(tuned)
    dispatcher.load([record(row.problem)])
    dispatcher._devices[-1] = attach_device(dispatcher, {tuned: kernel})
    assert tritongemm.explain("gram", x).startswith("exact: tile__")
    for one in (x, torch.randn(6, 20)):
        torch.testing.assert_close(tritongemm.gram(one), one @ one.T)
    assert kernel.launches == 2 and len(dispatcher.calls.table) == 1

"""`grouped_mm` and `fused_moe` under torch.func.functionalize and AOTAutograd, and PyTorch's own checks of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu.serving.test_traced_calls import CALLS

NAMES = [name for name in CALLS if name.startswith(("grouped_mm", "fused_moe"))]
TRAINED = ("grouped_mm", "grouped_mm masked", "fused_moe")
CHECKED = ("grouped_mm masked", "fused_moe", "fused_moe mx")  # in the quick set too: each takes half a second
Call = Callable[..., Tensor]


def of_tensors(name: str) -> tuple[Call, list[Tensor]]:
    """A call as a function of its tensors alone, and these."""
    call, given = CALLS[name]
    others = [None if isinstance(one, Tensor) else one for one in given]  # a graph that holds a tensor is of it alone

    def compute(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        result: Tensor = call(*(next(left) if other is None else other for other in others))
        return result

    return compute, [one for one in given if isinstance(one, Tensor)]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Keeps our operations that are called inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tritongemm":
            self.called.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_the_same_where_tensors_are_functional(name: str, remove: str) -> None:
    """Such a tensor has no memory whose numbers could be read: the ends of groups are those of what it wraps."""
    call, given = of_tensors(name)
    found, wanted = torch.func.functionalize(call, remove=remove)(*given), call(*given)
    assert found.dtype == wanted.dtype and (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_what_was_written_to_the_ends_of_groups_is_read() -> None:
    call, (a, b, _) = of_tensors("grouped_mm")

    def change(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        ends = ends.clone()
        ends[0].add_(1)
        return call(a, b, ends)

    before, after = (torch.tensor([first, 3, 5], dtype=torch.int32) for first in (1, 2))
    assert torch.equal(torch.func.functionalize(change)(a, b, before), call(a, b, after))


@pytest.mark.parametrize(("name", "place"), [("grouped_mm", 0), ("grouped_mm masked", 1), ("fused_moe", 0)])
def test_gradients_go_through_functional_tensors(name: str, place: int) -> None:
    call, given = of_tensors(name)

    def loss(one: Tensor) -> Tensor:
        return call(*given[:place], one, *given[place + 1 :]).square().sum()

    exact = torch.func.grad(loss)(given[place])
    inside, outside = (
        torch.func.functionalize(torch.func.grad(loss)),
        torch.func.grad(torch.func.functionalize(loss)),
    )
    assert bool(exact.any())
    for found in (inside(given[place]), outside(given[place])):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_functional_graph_has_it_as_one_operation(name: str) -> None:
    call, given = of_tensors(name)
    graph = make_fx(torch.func.functionalize(call), tracing_mode="symbolic")(*given)
    ours = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("tritongemm.")]
    assert ours == [f"tritongemm.{name.split()[0]}.default"]
    torch.testing.assert_close(graph(*given), call(*given))


@pytest.mark.parametrize("name", [name for name in NAMES if "masked" not in name])
def test_one_graph_of_aot_autograd_serves_any_number_of_rows(name: str) -> None:
    call, given = of_tensors(name)
    twice = [torch.cat([one, one]) for one in given]
    of_weights = (1, 4) if name.startswith("grouped") else (1, 2, 5, 6)
    more = [one if place in of_weights else both for place, (one, both) in enumerate(zip(given, twice, strict=True))]
    if name.startswith("grouped"):
        more[2] = given[2] * 2
    counted = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=counted, dynamic=True, fullgraph=True)
    for tensors in (given, more):
        assert torch.equal(compiled(*tensors), call(*tensors))
    assert counted.frame_count == 1


@pytest.mark.parametrize("name", TRAINED)
def test_aot_autograd_has_its_gradients(name: str) -> None:
    call, given = of_tensors(name)
    torch._dynamo.reset()
    found = [
        torch.autograd.grad(one(*leaves).square().sum(), [leaf for leaf in leaves if leaf.requires_grad])
        for one in (call, torch.compile(call, backend="aot_eager", fullgraph=True))
        for leaves in [[one.clone().requires_grad_(one.is_floating_point()) for one in given]]
    ]
    for eager, compiled in zip(*found, strict=True):
        assert bool(eager.any())
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [n if n in CHECKED else pytest.param(n, marks=pytest.mark.heavy) for n in NAMES])
def test_pytorch_finds_no_fault_with_the_operation(name: str) -> None:
    """Its schema, what fake tensors give, and AOTAutograd; also of the form that has gradients."""
    call, given = of_tensors(name)
    with Operations() as operations:
        call(*given)
    ((plain, arguments),) = operations.called
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(one.is_floating_point() and one.element_size() == 1 for one in given):
        checks.remove("test_schema")  # it multiplies copies of operands, which PyTorch does not do in fp8
    torch.library.opcheck(plain, arguments, test_utils=checks)
    trained = getattr(torch.ops.tritongemm, f"{name.split()[0]}_with_gradients").default
    torch.library.opcheck(trained, arguments, test_utils=checks)
    if name in TRAINED:
        wanting = [
            one.clone().requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one
            for one in arguments
        ]
        torch.library.opcheck(trained, tuple(wanting), test_utils=checks)

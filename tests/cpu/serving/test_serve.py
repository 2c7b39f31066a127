import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.linear_layers import attach_device, problem, record
from tests.support.refusals import fails
from tests.support.served_region import Graphs, ServedCalls, gpu_that_serves
from tritongemm.serving import api
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.serve import ServedRegion
from tritongemm.serving.tuned_calls import TunedCalls

Gpu: TypeAlias = tuple[Dispatcher, ServedCalls, Callable[..., Tensor]]
PLACES = ((functional, "linear"), (torch, "matmul"), (torch, "mm"), (torch, "addmm"))
METHODS = ("matmul", "__matmul__", "mm", "addmm")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """(a dispatcher with kernels for M=16, N=32 and K=64, calls that they served, what makes tensors)."""
    dispatcher = Dispatcher()
    records = [record(problem(16, 32, 64, bias)) for bias in ("none", "n")]
    with gpu_that_serves(monkeypatch, dispatcher, records) as (served, make):
        yield dispatcher, served, make


def functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in PLACES] + [getattr(Tensor, name) for name in METHODS]


def test_serves_the_products_of_linear_layers(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    before, x, w, bias = functions(), make(16, 64), make(32, 64), make(32)
    layer = nn.Linear(64, 32, device="meta")
    layer.weight, layer.bias = nn.Parameter(w, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    calls: list[Callable[[], Tensor]] = [
        lambda: functional.linear(x, w),
        lambda: functional.linear(input=x, weight=w, bias=bias),
        lambda: layer(x),
        lambda: x @ w.t(),
        lambda: torch.matmul(x, w.T),
        lambda: torch.mm(x, w.t()),
        lambda: x.mm(w.mT),
        lambda: torch.mm(input=x, mat2=w.t()),
        lambda: torch.matmul(input=x, other=w.t()),
        lambda: torch.addmm(bias, x, w.t()),
        lambda: bias.addmm(x, w.t()),
        lambda: torch.matmul(x.view(4, 4, 64), w.t()),
    ]
    with ServedRegion(None, dispatcher):
        for number, call in enumerate(calls, 1):
            assert call().shape[-1] == 32 and len(served.shapes) == number
    assert functions() == before and not {"mm", "matmul", "addmm"} & vars(Tensor).keys()


def test_what_no_row_holds_for_is_the_call_that_was_made(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    x, w = make(16, 64), make(32, 64)
    calls: list[Callable[[], Tensor]] = [
        lambda: functional.linear(make(17, 64), w),
        lambda: functional.linear(x, make(33, 64)),
        lambda: functional.linear(x.float(), w.float()),
        lambda: x @ make(64, 32),
        lambda: torch.mm(x, w.t(), out=make(16, 32)),
        lambda: torch.mm(x, w.t(), torch.float32),
        lambda: torch.addmm(make(32), x, w.t(), beta=0.5),
        lambda: torch.addmm(make(16, 32), x, w.t()),
        lambda: torch.matmul(make(64), w.t()),
        lambda: torch.matmul(make(2, 3, 4, 5), make(2, 3, 5, 6)),
    ]
    with ServedRegion(None, dispatcher):
        for call in calls:
            assert call().numel()
        assert not served.shapes
        fails(RuntimeError, "", torch.mm, make(2, 16, 64), w.t())
        fails(TypeError, "", functional.linear, [1.0], w)
        functional.linear(x, w)
        assert len(served.shapes) == 1


def test_calls_that_pytorch_has_to_see(gpu: Gpu) -> None:
    dispatcher, _, make = gpu
    calls = TunedCalls(dispatcher, lambda x, w, bias: x)
    x, w = make(16, 64), make(32, 64)
    assert calls.find(x, w) is not None and calls.find(x, w) is calls.find(x, w)
    trained = w.clone().requires_grad_()
    assert calls.find(x, trained) is None
    with torch.no_grad():
        assert calls.find(x, trained) is not None
    torch.set_autocast_enabled("cuda", True)
    try:
        assert calls.find(x, w) is None
    finally:
        torch.set_autocast_enabled("cuda", False)
    with torch.autograd.forward_ad.dual_level():
        assert calls.find(x, w) is None
    assert calls.find(make(17, 64), w) is None and calls(make(17, 64), w).shape == (17, 64)
    assert calls.find(torch.empty(16, 64, device="cpu"), w) is None


def test_the_kernels_own_fallback_is_not_served_again(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    with ServedRegion(None, dispatcher):
        functional.linear(make(16, 64), make(32, 64))
        (otherwise,) = served.otherwise
        assert otherwise(make(16, 64), make(32, 64), None, None).shape == (16, 32) and len(served.shapes) == 1
        # mm falls back on PyTorch's layer, which must not be the function in its place
        assert api.mm(torch.ones(2, 64), torch.ones(32, 64)).shape == (2, 32)


def test_regions_nest_and_are_left_by_an_error(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    before, region = functions(), ServedRegion(None, dispatcher)
    with pytest.raises(KeyError), region:
        with region, ServedRegion(None, dispatcher):
            functional.linear(make(16, 64), make(32, 64))
            assert len(served.shapes) == 1
        functional.linear(make(16, 64), make(32, 64))
        assert len(served.shapes) == 2
        raise KeyError
    assert functions() == before


def test_a_function_that_another_program_replaced_stays(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, served, make = gpu
    original = functional.linear
    with ServedRegion(None, dispatcher):
        inner = functional.linear
        theirs = lambda *args: inner(*args)
        monkeypatch.setattr(functional, "linear", theirs)
    assert functional.linear is theirs
    functional.linear(make(16, 64), make(32, 64))
    assert not served.shapes
    monkeypatch.undo()
    functional.linear = original


def test_all_threads_are_served(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    x, w = make(16, 64), make(32, 64)
    with ServedRegion(None, dispatcher):
        for _ in range(2):
            thread = threading.Thread(target=lambda: functional.linear(x, w))
            thread.start()
            thread.join()
    assert len(served.shapes) == 2 and len(served.otherwise) == 2  # each thread has its own launch


def test_other_records_are_seen_at_once(gpu: Gpu) -> None:
    dispatcher, served, make = gpu
    with ServedRegion(None, dispatcher):
        functional.linear(make(16, 64), make(32, 64))
        dispatcher.load([record(problem(16, 32, 64), winner="torch")])
        attach_device(dispatcher)
        assert functional.linear(make(16, 64), make(32, 64)).shape == (16, 32)
    assert len(served.shapes) == 1


def test_compiled_inside_it_is_the_operation_and_outside_it_is_not() -> None:
    dispatcher, graphs = Dispatcher(), Graphs()
    dispatcher.load([record(problem(16, 32, 64))])

    w, other = torch.randn(32, 64), torch.randn(33, 64)
    compiled = torch.compile(
        lambda x: functional.linear(x, w).sum() + functional.linear(x, other).sum(),
        dynamic=True,
        fullgraph=True,
        backend=graphs,
    )
    with torch.no_grad(), ServedRegion(None, dispatcher):
        for rows in (2, 5, 16):
            compiled(torch.randn(rows, 64))
    assert len(graphs) == 1 and graphs[0].count(torch.ops.tritongemm.mm) == 1
    with torch.no_grad():
        compiled(torch.randn(3, 64))
    assert torch.ops.tritongemm.mm not in graphs[1]

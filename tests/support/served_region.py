"""Shared by tests of what serves a model: a dispatcher that believes in a GPU, and tensors that pretend to be there."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support.linear_layers import StandInKernel, attach_device
from tests.support.nouns import Dispatcher, Patch, Problem, Record


class ServedCalls:
    """Stands in for kernels: each call that would be launched is kept."""

    def __init__(self) -> None:
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.otherwise: list[Any] = []

    def prepare(self, kernel: Any, device: Any, shape: tuple[int, ...], dtype: torch.dtype, otherwise: Any) -> Any:
        self.otherwise.append(otherwise)

        def call(x: Tensor, w: Tensor, bias: Tensor | None, _: torch.dtype | None, out: Tensor | None = None) -> Tensor:
            self.shapes.append((tuple(x.shape), tuple(w.shape)))
            return x.new_empty(shape, dtype=dtype) if out is None else out

        return call

    def prepare_view(self, _: Any, given: Any, reading: Any, otherwise: Any, kernel: Any, device: Any) -> Any:
        shape, dtype = reading.result
        return self.prepare(kernel, device, shape, dtype, otherwise)


@contextmanager
def gpu_that_serves(
    monkeypatch: Patch, dispatcher: Dispatcher, records: list[Record]
) -> Iterator[tuple[ServedCalls, Callable[..., Tensor]]]:
    """(the calls that kernels serve, a function that makes tensors on the GPU) while records are loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("tritongemm.operations.checks._modes", lambda: 0)  # fake tensors are one
    monkeypatch.setattr("tritongemm.serving.serve._PLAIN", {FakeTensor, torch.nn.Parameter})
    served = ServedCalls()
    monkeypatch.setattr("tritongemm.serving.launching.FastCall", served.prepare)
    monkeypatch.setattr("tritongemm.serving.launching.OperandCall", served.prepare_view)
    dispatcher.load(records)
    loaded: dict[Problem, Any] = {record.problem: StandInKernel() for record in records}
    attach_device(dispatcher, loaded)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda:0")

    with FakeTensorMode():
        yield served, make


class Graphs(list[list[Any]]):
    """What each graph of torch.compile calls, whose backend this is."""

    def __init__(self, backend: str = "eager") -> None:
        super().__init__()
        self.backend = torch._dynamo.lookup_backend(backend)
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return self.backend(graph, inputs)


def copies(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model as it is copied and as it is saved and read."""
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return copy.deepcopy(model), torch.load(saved, weights_only=False)


def compile_for_each_m(function: Callable[[Tensor], Any], make: Callable[..., Tensor]) -> list[list[Any]]:
    """What each graph calls that torch.compile makes of a function of x [M, 64], when it is called with several M."""
    graphs = Graphs()
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for rows in (2, 3, 16, 300):
            compiled(make(rows, 64))
    return graphs

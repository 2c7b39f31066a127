from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.linear_layers import attach_device, run_on_cpu
from tritongemm.serving.dispatcher import Dispatcher

Gpu: TypeAlias = tuple[Dispatcher, Callable[..., Tensor]]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dispatcher = Dispatcher()
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    return dispatcher


@pytest.fixture
def gpu(unloaded: Dispatcher) -> Iterator[Gpu]:
    """(a dispatcher that believes in an sm90, what makes fake tensors there)."""
    attach_device(unloaded)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield unloaded, lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="cuda:0")

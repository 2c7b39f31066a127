import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakes import servers
from tests.support.nouns import Caplog, Patch
from tritongemm.integrations import process, sglang, sglang_w4, vllm
from tritongemm.serving import server_calls
from tritongemm.serving.calls import CallTable
from tritongemm.serving.dispatcher import Dispatcher

ACTIVATIONS = ("x", "A", "mat_a", "hidden_states")


class Broken:
    """A layer, or a part of one, of which nothing can be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("broken")


@pytest.fixture(autouse=True)
def everything_has_rows(config: Any, monkeypatch: Patch) -> None:
    for name in ("serves_scales", "serves_four_bits", "serves_experts"):
        monkeypatch.setattr(process, name, lambda invariant=False: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)


def answering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A server's function that computes broken layers too."""

    @functools.wraps(function)
    def answer(*given: Any, **named: Any) -> str:
        return "the server"

    return answer


def costs_itself_alone(call: Callable[..., Any], caplog: Caplog) -> bool:
    """Whether the server computes a broken layer, and a line of each hook before it says so once."""
    _, *others = inspect.signature(call).parameters.values()
    named: dict[str, Any] = {one.name: Broken() for one in others if one.kind is not one.VAR_KEYWORD}
    named |= {name: torch.ones(1, 1) for name in named if name in ACTIVATIONS}
    return says_so_once(partial(call, Broken(), **named), caplog)


def says_so_once(call: Callable[[], Any], caplog: Caplog) -> bool:
    caplog.clear()
    answers = [call() for _ in range(2)]
    lines = [r.getMessage() for r in caplog.records]
    known = "is not as the plug-in knows it (RuntimeError: broken); it is computed as without tuned kernels"
    once = len(lines) == len(set(lines)) > 0
    return once and answers in (["the server"] * 2, [None] * 2) and all(line.endswith(known) for line in lines)


def test_a_layer_that_cannot_be_read_costs_vllm_no_other_one(monkeypatch: Patch, caplog: Caplog) -> None:
    servers.install_vllm(monkeypatch)
    blocks = servers.install_vllm_blocks(monkeypatch)
    kernels = servers.install_vllm_int4(monkeypatch)
    linear: Any = sys.modules["vllm.model_executor.kernels.linear"]
    linear._POSSIBLE_FP8_BLOCK_KERNELS = {"CUDA": list(blocks)}
    servers.install_vllm_mixtures(monkeypatch)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    owners = {*modules, *classes, *blocks, *kernels}
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType) and name != "__init__":
                setattr(owner, name, answering(value))
    vllm.register()
    assert not caplog.records
    hooked = {one for owner in owners for one in vars(owner).values() if process.is_hooked(one)}
    assert len(hooked) >= 5 and not [one for one in hooked if not costs_itself_alone(one, caplog)]
    for every in (torch.ops._C.marlin_gemm, torch.ops._C.cutlass_scaled_mm, torch.ops.vllm.fp8_gemm_nt_op):
        given = [Broken() for _ in every.default._schema.arguments]
        assert says_so_once(partial(every.default._op._hook, answering(every), *given), caplog)


def test_a_layer_that_cannot_be_read_costs_sglang_no_other_one(monkeypatch: Patch, caplog: Caplog) -> None:
    registry, *_ = servers.install_sglang(monkeypatch)
    servers.install_sglang_int4(monkeypatch)
    sglang.register()
    assert not caplog.records
    places = [place.rpartition(".") for place, hooks in registry._hooks.items() if hooks]
    owners = [(pkgutil.resolve_name(owner), name) for owner, _, name in places]
    for owner, name in owners:
        monkeypatch.setattr(owner, name, answering(getattr(owner, name)))
    registry.apply_hooks()
    assert len(owners) >= 9 + 2 * len(sglang_w4.SCHEMES)
    assert not [name for owner, name in owners if not costs_itself_alone(getattr(owner, name), caplog)]


def test_an_sglang_that_has_it_says_which_calls_come_often(monkeypatch: Patch) -> None:
    names = ["sglang", "srt", "model_executor", "runner_utils", "capture_mode"]
    for count in range(1, 1 + len(names)):
        module = ModuleType(".".join(names[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert sglang._in_graphs() is None, "a version that has no such function"
    monkeypatch.setattr(module, "get_is_capture_mode", lambda: True, raising=False)
    assert (often := sglang._in_graphs()) is not None and often(7)


def test_what_the_server_computes_is_asked_once(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """A decline holds for the layer and its sizes, until rows are added, gradients are wanted or calls are counted."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: list[int] = []

    def read(own: Any, method: Any, layer: Any, x: torch.Tensor) -> Any:
        asked.append(len(x))
        return None if len(x) == 1 else (own if len(x) == 2 else lambda: -x)

    hook, layer = process.make_layer_hook("server", "layer", read), torch.nn.Linear(2, 2)
    for rows in (1, 2, 3, 1, 2, 3):
        with torch.no_grad():
            result = hook(lambda method, layer, x: x, None, layer, torch.full((rows, 2), 5.0))
        assert (result == (-5.0 if rows == 3 else 5.0)).all()
    assert asked == [1, 2, 3, 3]
    hook(lambda method, layer, x: x, None, torch.nn.Linear(2, 2), torch.ones(1, 2))  # another layer, with gradients
    unloaded.calls = CallTable()
    for _ in range(2):
        hook(lambda method, layer, x: x, None, layer, torch.ones(1, 2))
    with torch.no_grad(), monkeypatch.context() as patch:
        hook(lambda method, layer, x: x, None, layer, torch.ones(2, 2))
        patch.setattr(server_calls, "product_or", lambda *given: None)
        hook(lambda method, layer, x: x, None, layer, torch.ones(2, 2))
    assert asked[4:] == [1, 1, 1, 2, 2]


def test_a_call_whose_kernel_is_known_is_not_looked_at(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """Nor is one of which it is known that it has none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: list[int] = []

    def read(own: Any, method: Any, layer: Any, x: torch.Tensor) -> Any:
        pytest.fail("looked at")

    def serve(method: Any, layer: Any, x: torch.Tensor) -> Any:
        asked.append(len(x))
        return -x if len(x) == 1 else False

    hook, layer = process.make_layer_hook("server", "layer", read, serve=serve), torch.nn.Linear(2, 2)
    with torch.no_grad():
        for rows in (1, 2, 1, 2):
            result = hook(lambda method, layer, x: x, None, layer, x=torch.ones(rows, 2))
            assert (result == (-1.0 if rows == 1 else 1.0)).all()
    assert asked == [1, 2, 1]


def test_a_call_that_cannot_be_served_is_looked_at(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """An error ends no server, and a decline that was found by former rows does not hold beside new ones."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: list[int] = []

    def read(own: Any, method: Any, layer: Any, x: torch.Tensor) -> Any:
        asked.append(len(x))
        unloaded.calls = CallTable()  # as another thread adds rows

    def serve(method: Any, layer: Any, x: torch.Tensor) -> Any:
        raise AttributeError("a server of another version")

    hook, layer, x = process.make_layer_hook("server", "layer", read, serve=serve), torch.nn.Linear(2, 2), torch.ones(1)
    with torch.no_grad():
        assert all(hook(lambda method, layer, x: x, None, layer, x) is x for _ in range(2))
    assert asked == [1, 1]


def test_a_mixture_that_the_server_computes_is_asked_once(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    """Its activations and result are held by objects, and its arguments may have their names."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: list[Any] = []

    def read(own: Any, method: Any, layer: Any, given: Any) -> Any:
        asked.append(given)
        return lambda: SimpleNamespace(hidden_states=own().hidden_states)

    hook, layer = process.make_layer_hook("server", "mixture", read, "hidden_states"), torch.nn.Linear(2, 2)
    given = SimpleNamespace(hidden_states=torch.ones(1, 2))
    with torch.no_grad():
        assert all(hook(lambda method, layer, given: given, None, layer=layer, given=given) for _ in range(3))
    assert asked == [given]

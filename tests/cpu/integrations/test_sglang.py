"""SGLang's plug-in: on a stand-in of its modules everywhere, on the real ones where they can be imported."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support.fakes.servers import install_sglang, layer_of
from tests.support.linear_layers import problem, record
from tests.support.served_region import compile_for_each_m, gpu_that_serves
from tritongemm.integrations import sglang
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.sources.invariant_kernel import InvariantKernel


def test_serves_what_a_row_holds_for(config: Path, unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, places, mode = install_sglang(monkeypatch)
    for _ in range(3):
        sglang.register()
    assert [len(hooks) for hooks in registry._hooks.values() if hooks] == [1] * 5
    registry.apply_hooks()
    method = places.UnquantizedLinearMethod()
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (served, make):
        for x, w in ((make(17, 64), make(32, 64)), (make(16, 64), make(33, 64))):
            assert method.apply(layer_of(w), x).shape == (x.shape[0], w.shape[0]) and not served.shapes
        assert method.apply(layer_of(make(32, 64)), x=make(16, 64), bias=None).shape == (16, 32)
        assert served.shapes == [((16, 64), (32, 64))]
        mode.is_batch_invariant_mode_enabled = lambda: True
        assert method.apply(layer_of(make(32, 64)), make(16, 64)).shape == (16, 32) and len(served.shapes) == 1
        assert unloaded.wants_invariant_rows
        unloaded.invariant_weights = frozenset([(32, 64, False)])  # as if its row stated an order
        monkeypatch.setattr(InvariantKernel, "review", lambda self, answer, call, device: answer)
        assert method.apply(layer_of(make(32, 64)), make(16, 64)).shape == (16, 32) and len(served.shapes) == 2
        mode.is_batch_invariant_mode_enabled = lambda: False
        assert method.apply(layer_of(make(32, 64)), make(16, 64)).shape == (16, 32)
        assert not unloaded.wants_invariant_rows


def test_one_graph_serves_every_m(config: Path, unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, places, mode = install_sglang(monkeypatch)
    sglang.register()
    registry.apply_hooks()
    method, operands = places.UnquantizedLinearMethod(), (torch.randn(3, 64), torch.randn(32, 64), torch.randn(32))
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (_, make):
        layer = layer_of(make(32, 64))
        assert compile_for_each_m(lambda x: method.apply(layer, x), make) == [[torch.ops.tritongemm.sglang_linear]]
        mode.is_batch_invariant_mode_enabled = lambda: True
        unloaded.invariant_weights = frozenset([(32, 64, False)])  # as if its row stated an order
        assert compile_for_each_m(lambda x: method.apply(layer, x), make) == [[torch.ops.tritongemm.sglang_linear]]
    # Without a row the method itself computes, in the operation's body.
    assert torch.equal(torch.ops.tritongemm.sglang_linear(*operands), functional.linear(*operands))


@pytest.mark.servers
def test_the_real_server(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("sglang.srt.plugins.hook_registry", exc_type=ImportError)
    unquant = pytest.importorskip("sglang.srt.layers.quantization.unquant", exc_type=ImportError)
    monkeypatch.setattr(unquant.UnquantizedLinearMethod, "apply", unquant.UnquantizedLinearMethod.apply)
    sglang.register()
    hooks.HookRegistry.apply_hooks()
    assert unquant.UnquantizedLinearMethod.apply.__wrapped__ is not None
    for n in (32, 33):
        x, w = torch.randn(3, 64), torch.randn(n, 64)
        assert torch.equal(unquant.UnquantizedLinearMethod().apply(layer_of(w), x), functional.linear(x, w))
    hooks.HookRegistry.reset()

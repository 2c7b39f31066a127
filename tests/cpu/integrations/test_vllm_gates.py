from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.fakes.servers import install_vllm
from tests.support.formats import read_text
from tests.support.linear_layers import StandInKernel, problem, record, stand_in_kernels
from tests.support.nouns import Problem, fails
from tritongemm.integrations import loaded_model, vllm, vllm_gates
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.workloads.capturing.session import capture

K, INNER = 64, 96


class UnquantizedLinearMethod:
    __slots__ = ()  # so that an object's class can't become one with a dict

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, layer.weight, bias)


class Linear(nn.Module):  # type: ignore[misc]
    def __init__(self, k: int, sizes: list[int], bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sum(sizes), k).bfloat16() / 8)
        self.bias = nn.Parameter(torch.ones(sum(sizes)).bfloat16()) if bias else None
        self.output_sizes, self.quant_method = sizes, UnquantizedLinearMethod()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.quant_method.apply(self, x, self.bias), None


class SiluAndMul(nn.Module):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up


class GeluAndMul(nn.Module):  # type: ignore[misc]
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.gelu(gate, approximate=self.approximate) * up


class Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, bias: bool = False, act: Any = SiluAndMul) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(K, [INNER, INNER], bias), Linear(INNER, [K])
        self.act_fn = act()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        x, _ = self.down_proj(x)
        return x


class Halved(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def load(m: int, winner: str, seconds: float = 2e-6, act: str = "silu_mul") -> None:
    of = problem(m, 2 * INNER, K)
    row = Problem(of.m, of.n, of.k, of.a, of.b, of.c, epilogue=act)
    product = record(of.at(m + 4), m_from=1)  # a row of a range that ends above
    default_dispatcher().load([product, replace(record(row, winner=winner, m_from=m - 1), seconds=seconds)])
    kernels = stand_in_kernels(default_dispatcher()._records)
    kernels.loaded_ranges = {row: StandInKernel()} if winner == "triton" else {}
    default_dispatcher()._devices[-1] = kernels


def test_gate_up_and_silu_are_one_operation(unloaded: Dispatcher) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([Mlp(), Mlp(bias=True), Halved()]), torch.randn(16, K).bfloat16()
    with torch.no_grad():
        wanted, weight = [mlp(x) for mlp in model], model[0].gate_up_proj.weight
        load(64, "torch")
        assert not vllm_gates.serve(model) and default_dispatcher().gated_weights == {(2 * INNER, K)}
        load(32, "triton", 5e-6)  # the product takes 2 us
        assert not vllm_gates.serve(model)
        load(16, "triton", 3.5e-6)
        assert vllm_gates.serve(model) == 1
        for mlp, theirs in zip(model, wanted, strict=True):
            torch.testing.assert_close(mlp(x), theirs, rtol=0.02, atol=0.02)
        found = torch.compile(model[0], backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, wanted[0], rtol=0.02, atol=0.02)
    method = model[0].gate_up_proj.quant_method
    assert isinstance(method, UnquantizedLinearMethod) and type(method).__name__ == "UnquantizedLinearMethod"
    assert vllm_gates.serve(model) == 0  # what is served is not taken apart again
    gelu = nn.ModuleList([Mlp(act=partial(GeluAndMul, one)) for one in ("tanh", "none")])
    with torch.no_grad():
        wanted = [mlp(x) for mlp in gelu]
        load(16, "triton", act="gelu_tanh_mul")
        assert vllm_gates.serve(gelu) == 1
        for mlp, theirs in zip(gelu, wanted, strict=True):
            torch.testing.assert_close(mlp(x), theirs, rtol=0.02, atol=0.02)
    fails(RuntimeError, "start vLLM anew", weight.weight_loader, weight, x)


@pytest.mark.parametrize(("lora", "wanted"), [(None, True), (object(), False)])
def test_adapters_keep_the_product_of_gate_and_up(
    unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch, lora: Any, wanted: bool
) -> None:
    install_vllm(monkeypatch)
    asked: list[bool] = []
    monkeypatch.setattr(loaded_model, "prepare", lambda *given: asked.append(given[-1]))
    vllm._hook_loading(True)
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    BaseModelLoader().load_model(SimpleNamespace(lora_config=lora))
    assert asked == [wanted]


def test_a_capture_counts_the_product_and_the_operation(tmp_path: Path) -> None:
    model, x = nn.ModuleList([Mlp(), Halved()]), torch.randn(16, K).bfloat16()
    with capture(tmp_path / "sizes.yaml"), torch.no_grad():
        wanted = model[0](x)
        vllm_gates.count(model)
        torch.testing.assert_close(torch.compile(model[0], backend="aot_eager")(x), wanted)
    counts = {
        (row.problem.n, row.problem.epilogue): row.count for row in read_text((tmp_path / "sizes.yaml").read_text())
    }
    assert counts == {(2 * INNER, "none"): 2, (2 * INNER, "silu_mul"): 1, (K, "none"): 1}

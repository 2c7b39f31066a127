from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.cpu.integrations.test_int4_layers import LinearBase
from tests.cpu.operations.test_four_bit_weights import GROUP, HALF, NUMBERS, K, N
from tests.gpu.here import record, replayed
from tests.support.fakes.servers import install_vllm, install_vllm_int4
from tests.support.nouns import Config, Family, Groups, Machine, Patch, Problem, matrices, registry, results_format
from tests.support.patched_layers import row_of_int4
from tritongemm.integrations import vllm
from tritongemm.numerics.verify import deviation
from tritongemm.operations.linear_w4 import dequantize
from tritongemm.serving import server_calls

pytestmark = pytest.mark.usefixtures("gpu_machine", "dispatcher")
EXPERTS, HIDDEN, INNER = 4, 256, 128


def in_graph(call: Any, *given: Tensor) -> Tensor:
    """What a captured call computes, after one that loads its kernels."""
    call(*given)
    out: Tensor = replayed(call, *given)
    return out


def test_vllms_int4_layer_in_a_compiled_graph(tmp_path: Path, monkeypatch: Patch) -> None:
    of, file = row_of_int4("halves_32", m=4, bias="n").problem, tmp_path / "tuned.yaml"
    file.write_text(results_format().write([record(of, Config("tile", 16, 64, 64, 1, 1, 4, 2))]), encoding="utf-8")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    monkeypatch.setenv("TRITONGEMM_FREE", "0")  # whatever tests beside this one hold
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: True)
    install_vllm(monkeypatch)
    kind, _ = install_vllm_int4(monkeypatch)
    vllm.register()
    layer = LinearBase(kind).cuda()
    layer.qweight.output_dim = layer.scales.output_dim = 0
    layer.load()
    assert layer.tritongemm_w4_left == ""
    x = torch.randn(4, K, device="cuda").bfloat16()
    factors = HALF.double().t().repeat_interleave(GROUP, 1)
    exact = x.double() @ ((NUMBERS - 8) * factors).t().cuda() + torch.arange(N, device="cuda")
    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        assert deviation(in_graph(call, x), exact) < 1e-2
    assert tritongemm.explain("linear_w4", x, layer.tritongemm_w4_weight, layer.tritongemm_w4_scale,
                              "halves_32", layer.tritongemm_w4_bias).startswith("exact: ")  # fmt: skip


class Mxfp4GptOssExperts(nn.Module):  # type: ignore[misc]
    """The experts as transformers 5.24 has them, without its library of kernels."""

    alpha, limit = 1.702, 7.0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("the library's own product was called")


Mxfp4GptOssExperts.__module__ = "transformers.integrations.mxfp4"


def test_gpt_oss_experts_in_a_graph(gpu_machine: Machine) -> None:
    experts, numbers = Mxfp4GptOssExperts(), {}
    layout = SimpleNamespace(unswizzle_data=lambda data: data)
    records = []
    for name, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        weight = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(117, 124, (EXPERTS, n, k // 32), dtype=torch.uint8, device="cuda")
        bias = torch.randn(EXPERTS, n, device="cuda")
        stored = (SimpleNamespace(storage=SimpleNamespace(data=one.mT, layout=layout)) for one in (weight, scale))
        first, second = stored
        setattr(experts, name, first)
        setattr(experts, f"{name}_precision_config", SimpleNamespace(weight_scale=second))
        setattr(experts, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
        each = zip(weight, scale, strict=True)
        numbers[name] = torch.stack([dequantize(w, s, "plain", torch.float32) for w, s in each]).double(), bias.double()
        plain = Problem(12, n, k, *matrices("bf16", "fp4e2m1", "bf16", layout="TN"), groups=Groups(EXPERTS))
        of = registry.get(Family, "a16w4").problem(plain, "weight_mx")
        records.append(record(of, Config("grouped", 16, 64, 64, 1, 1, 4, 2)))
    patched = tritongemm.patch(nn.ModuleDict({"experts": experts}), records)
    assert str(patched) == "1 of 1 linear layers and mixtures of experts are served"
    x = torch.randn(6, HIDDEN, device="cuda").bfloat16()
    weights, ids = torch.rand(6, EXPERTS, device="cuda").topk(2)
    (w1, b1), (w2, b2) = numbers.values()
    exact = torch.zeros(6, HIDDEN, dtype=torch.float64, device="cuda")
    for token in range(6):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            both = w1[expert] @ x[token].double() + b1[expert]
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            exact[token] += weight * (w2[expert] @ inner + b2[expert])
    assert deviation(in_graph(experts, x, ids, weights), exact) < 4e-2

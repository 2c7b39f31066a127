from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fakes.servers import install_vllm
from tests.support.linear_layers import attach_device, problem, record
from tests.support.nouns import Caplog, Dispatcher, Groups, InputError, Patch, Support
from tests.support.products import product
from tritongemm.integrations import loaded_model, vllm

EXPERTS = 4
FP8 = torch.float8_e4m3fn


def test_what_is_said_of_a_model(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    scaled = product("a8w8_blockscale", 16, 256, 128, "fp8e4m3fn")
    elsewhere = replace(record(problem(16, 48, 64)), target="gfx942")
    of = [product("dense", 32, n, 128, "bf16", groups=Groups(EXPERTS)) for n in (256, 128)]
    unloaded.load([record(problem(16, 32, 64)), record(scaled), *map(record, of), elsewhere])
    refused = record(problem(16, 40, 64))  # this Triton does not compile its kernel
    unloaded.load([refused])
    attach_device(unloaded, {refused.problem: Support("does not compile")})
    unloaded._devices[-1] = unloaded._devices[0]

    class LinearBase(nn.Module):  # type: ignore[misc]
        def __init__(self, weight: Tensor, method: str, **others: Any) -> None:
            super().__init__()
            self.weight, self.quant_method = weight, type(method, (), {})()
            vars(self.quant_method).update(others)

    class Mixture(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.quant_method = type("UnquantizedFusedMoEMethod", (), {})()
            self.w13_weight, self.w2_weight = torch.ones(EXPERTS, 2 * inner, 128), torch.ones(EXPERTS, 128, inner)

    in_blocks = LinearBase(torch.ones(256, 128).to(FP8), "Fp8LinearMethod")
    in_blocks.weight_scale_inv = torch.ones(2, 1)
    marlin = type("MarlinLinearKernel", (), {})()
    plain = "UnquantizedLinearMethod"
    layers = [LinearBase(torch.ones(n, 64), plain) for n in (32, 32, 33, 48, 40)]
    quantised = [LinearBase(torch.ones(4, 4).int(), "GPTQMarlinLinearMethod", kernel=marlin) for _ in range(2)]
    tensor_wise = LinearBase(torch.ones(256, 128).to(FP8), "ModelOptFp8LinearMethod")
    cutlass = type("CutlassFP8ScaledMMLinearKernel", (), {})()
    in_rows = LinearBase(torch.ones(256, 128).to(FP8).t(), "Fp8LinearMethod", fp8_linear=cutlass)
    in_rows_of_sglang = LinearBase(torch.ones(256, 128).to(FP8).t(), "CompressedTensorsLinearMethod")
    in_rows_of_sglang.weight_scale = torch.ones(256, 1)
    type(in_rows_of_sglang.quant_method).__module__ = "sglang.srt"
    mixtures = Mixture(128), Mixture(64)
    model = nn.ModuleList(
        [*layers, in_blocks, *quantised, tensor_wise, in_rows, in_rows_of_sglang, *mixtures, nn.Linear(2, 2)]
    )
    assert loaded_model.describe(model) == (
        "tuned kernels serve 3 of 11 linear layers and 1 of 2 mixtures of experts of ModuleList; the server itself "
        "computes 4 without a row, 2 of MarlinLinearKernel, 1 with rows that are for gfx942, "
        "1 with rows that are refused when loaded, 1 of ModelOptFp8LinearMethod"
    )
    theirs = [Mixture(128) for _ in range(4)]
    for mixture in theirs[2:]:
        type(mixture.quant_method).__module__ = "sglang.srt"
    for mixture, experts in zip(theirs, ("FlashInferExperts", "TritonExperts"), strict=False):
        mixture.quant_method.moe_kernel = SimpleNamespace(fused_experts=type(experts, (), {})())
    for mixture, is_triton in zip(theirs[2:], (False, True), strict=True):
        backend = SimpleNamespace(value="deep_gemm", is_triton=lambda is_triton=is_triton: is_triton)
        mixture.quant_method.runner = SimpleNamespace(runner_backend=backend)
    assert loaded_model.describe(nn.ModuleList(theirs)) == (
        "tuned kernels serve 2 of 4 mixtures of experts of ModuleList; the server itself computes "
        "1 of FlashInferExperts, 1 of deep_gemm"
    )
    unreadable = LinearBase(torch.ones(256, 128).to(FP8), "Fp8LinearMethod")
    unreadable.weight_scale_inv = torch.ones(2, 1)
    unreadable.weight = None
    type(unreadable.quant_method).linear_kernel = property(lambda method: 1 // 0)
    assert loaded_model.describe(nn.ModuleList([layers[0], unreadable])) == (
        "tuned kernels serve 1 of 2 linear layers of ModuleList; the server itself computes "
        "1 that can't be read (LinearBase: integer division or modulo by zero)"
    )
    unloaded.invariant_weights = frozenset({(256, 128, True)})
    assert loaded_model.describe(nn.ModuleList([*layers[:1], in_blocks]), invariant=True) == (
        "tuned kernels serve 1 of 2 linear layers of ModuleList; the server itself computes 1 without a row that "
        "states its order of additions"
    )


def test_loading_a_model_never_fails(config: Path, unloaded: Dispatcher, monkeypatch: Patch, caplog: Caplog) -> None:
    install_vllm(monkeypatch)
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    for _ in range(2):
        vllm.register()
    layer = nn.Linear(64, 32)
    assert BaseModelLoader().load_model(layer) is layer and not caplog.records  # on no GPU
    monkeypatch.setattr(nn.Parameter, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(unloaded, "device", lambda index: (_ for _ in ()).throw(InputError("no driver")))
    with caplog.at_level(logging.INFO, "tritongemm"):
        assert BaseModelLoader().load_model(layer) is layer
    assert [r.getMessage() for r in caplog.records] == ["InputError: no driver; nothing is served by tuned kernels"]
    assert not unloaded.weights and not unloaded.layer_weights  # no call fails for the same reason
    vllm.register()
    assert not unloaded.weights

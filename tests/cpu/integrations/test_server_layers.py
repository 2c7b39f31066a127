"""Layers of a server beside plain linear ones: compiled code, given memory, output layers, mixtures."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.support.fakes import servers
from tests.support.fakes.servers import install_sglang, install_vllm, install_vllm_mixtures, layer_of
from tests.support.linear_layers import StandInKernel, name_table, problem, record, run_on_cpu, stand_in_kernels
from tests.support.nouns import Caplog, Dispatcher, Groups, Patch
from tests.support.products import product
from tests.support.served_region import gpu_that_serves
from tritongemm.integrations import compiled, process, sglang, vllm
from tritongemm.integrations.process import is_in_blocks
from tritongemm.operations.mixture import MixtureOperands
from tritongemm.serving import server_calls

FP8 = torch.float8_e4m3fn
EXPERTS, HIDDEN, INNER, TOPK = 4, 128, 128, 2


def mixture(tokens: int, dtype: torch.dtype = torch.bfloat16, scaled: bool = False) -> dict[str, Any]:
    weights = torch.ones(EXPERTS, 2 * INNER, HIDDEN), torch.ones(EXPERTS, HIDDEN, INNER)
    w1, w2 = (w.to(FP8 if scaled else dtype) for w in weights)
    ids = torch.zeros(tokens, TOPK, dtype=torch.int32)
    return {
        "hidden_states": torch.ones(tokens, HIDDEN, dtype=dtype), "w1": w1, "w2": w2,
        "topk_weights": torch.ones(tokens, TOPK), "topk_ids": ids, "activation": SimpleNamespace(value="silu"),
        "expert_map": None, "apply_router_weight_on_input": False,
    }  # fmt: skip


def operands(tokens: int) -> MixtureOperands:
    names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    given = mixture(tokens)
    return MixtureOperands(*(given[name] for name in names))


class Routed(NamedTuple):
    """What SGLang's router gives."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: None = None


@pytest.fixture
def mixtures(monkeypatch: Patch) -> list[MixtureOperands]:
    """Mixtures that reach tuned kernels, whose answer is 3; those of 16 tokens do."""
    calls: list[MixtureOperands] = []

    def mixture_or(operands: MixtureOperands, otherwise: Callable[..., Tensor], factor: float = 1.0) -> Tensor:
        if operands.x.shape[0] != 16:
            return otherwise(operands)
        calls.append(operands)
        return operands.x.new_full(operands.x.shape, 3.0 * factor)

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    return calls


@pytest.fixture
def of_mixtures(tmp_path: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    name_table(tmp_path, monkeypatch, record(product("dense", 32, 2 * INNER, HIDDEN, "bf16", groups=Groups(EXPERTS))))


def test_code_of_inductor_is_served_where_a_row_holds(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    extern_kernels = SimpleNamespace(mm=torch.mm, addmm=torch.addmm)
    for name in ("torch._inductor.kernel", "torch._inductor.kernel.mm", "torch._inductor.select_algorithm"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(extern_kernels=extern_kernels))
    for _ in range(2):
        compiled.serve_compiled_code()
    records = [record(problem(16, 32, 64)), record(problem(16, 32, 64, bias="n"))]
    with gpu_that_serves(monkeypatch, unloaded, records) as (served, make):
        for rows, n, count in ((16, 32, 1), (17, 32, 1), (17, 32, 1), (16, 33, 1), (16, 32, 2)):
            out = make(rows, n)
            assert extern_kernels.mm(make(rows, 64), make(n, 64).t(), out=out) is out and len(served.shapes) == count
        x, w, bias = make(16, 64), make(32, 64).t(), make(32)
        for row in (bias, bias.expand(16, 32)):
            assert extern_kernels.addmm(row, x, w, alpha=1, beta=1, out=make(16, 32)).shape == (16, 32)
        assert len(served.shapes) == 4
        extern_kernels.mm(x, make(64, 32), out=make(16, 32))  # no transposed weight
        extern_kernels.mm(x, w, out=make(32, 16).t())
        assert len(served.shapes) == 4 and extern_kernels.mm(x, w).shape == (16, 32)
    given = torch.randn(3, 64), torch.randn(64, 32)
    assert torch.equal(extern_kernels.mm(*given, out=torch.empty(3, 32)), torch.mm(*given))
    summand = torch.randn(3, 32)
    result = extern_kernels.addmm(summand, *given, alpha=2, beta=1, out=torch.empty(3, 32))
    assert torch.equal(result, torch.addmm(summand, *given, alpha=2))


def test_sglangs_other_methods_and_its_output_layer(config: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    hooks, places, _ = install_sglang(monkeypatch)
    sglang.register()
    hooks.apply_hooks()
    method, logits = places.UnquantizedLinearMethod(), places.LogitsProcessor()
    with gpu_that_serves(monkeypatch, unloaded, [record(problem(16, 32, 64))]) as (served, make):
        layer = layer_of(make(32, 64))
        for rows in (16, 17):
            x, out = make(rows, 64), make(rows, 32)
            assert method.apply_into(layer, x, out) is out
            assert method.apply_with_addend(layer, x, out).shape == (rows, 32)
            assert logits._compute_lm_head(x, layer).shape == (rows, 32) and len(served.shapes) == 3
        logits.use_fp32_lm_head = True
        logits._compute_lm_head(make(16, 64), layer)
        assert len(served.shapes) == 3


def test_a_version_of_sglang_without_these_methods(config: Path, monkeypatch: Patch, caplog: Caplog) -> None:
    hooks, places, _ = install_sglang(monkeypatch)
    del places.UnquantizedLinearMethod.apply_with_addend, places.LogitsProcessor._compute_lm_head
    places.UnquantizedLinearMethod.apply_into = lambda self, layer, x, result: result
    sglang.register()
    assert process.lacks_hooks()  # and layers that have rows are not counted as served
    into, output = (r.getMessage() for r in caplog.records)
    assert "takes layer, x, result, not layer, x, output, bias" in into and into.endswith("write to given memory")
    assert "_compute_lm_head" in output and output.endswith("tuned kernels serve no output layer")
    assert sum(map(bool, hooks._hooks.values())) == 2
    caplog.clear()
    monkeypatch.delattr("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod")
    hooks._hooks.clear()
    sglang.register()
    assert sum(map(bool, hooks._hooks.values())) == 1  # loading, which needs no layer
    assert len(caplog.records) == 2 and "linear layers, plain linear layers with an addend, plain" in caplog.text


@pytest.mark.parametrize("scaled", [False, True])
def test_vllms_mixtures(
    of_mixtures: None, mixtures: list[MixtureOperands], monkeypatch: Patch, caplog: Caplog, scaled: bool
) -> None:
    install_vllm(monkeypatch)
    modular = install_vllm_mixtures(monkeypatch)
    for _ in range(2):
        vllm.register()
    experts, prepares = type("TritonExperts", (), {})(), type("MoEPrepareAndFinalizeNoDPEPModular", (), {})()
    scales = [torch.ones(EXPERTS, n // 128, k // 128) if scaled else None for n, k in ((256, 128), (128, 128))]
    none = dict.fromkeys(("quant_dtype", "gemm1_alpha", "a1_scale", "a2_scale", "per_act_token_quant"))
    experts.quant_config = SimpleNamespace(**none, w1_scale=scales[0], w2_scale=scales[1])
    kernel = modular.FusedMoEKernelModularImpl(prepares, experts)
    assert bool((kernel.apply(**mixture(16, scaled=scaled)) == 3).all())
    assert mixtures[0].w1_scale is scales[0] and bool((kernel.apply(**mixture(17, scaled=scaled)) == 9).all())
    others: list[dict[str, Any]] = [
        {"activation": SimpleNamespace(value="gelu_tanh")}, {"expert_map": torch.zeros(4)},
        {"apply_router_weight_on_input": True}, {"w1": torch.ones(EXPERTS, 256, HIDDEN)},
    ]  # fmt: skip
    for other in others:
        assert bool((kernel.apply(**{**mixture(16, scaled=scaled), **other}) == 9).all()), other
    rows = {
        "per_act_token_quant": True,
        "w1_scale": torch.ones(EXPERTS, 256, 1),
        "w2_scale": torch.ones(EXPERTS, 128, 1),
    }
    if scaled:
        before = dict(vars(experts.quant_config))
        for change, wanted in (({}, 3), ({"a1_scale": torch.ones(1)}, 9), ({"w1_scale": torch.ones(EXPERTS, 1, 1)}, 9)):
            vars(experts.quant_config).update({**before, **rows, **change})
            assert bool((kernel.apply(**mixture(16, scaled=True)) == wanted).all()), change
        assert mixtures.pop().w1_scale.shape == (EXPERTS, 256)  # type: ignore[union-attr]
        vars(experts.quant_config).update(before)
    experts.quant_config.gemm1_alpha = 1.7
    assert bool((kernel.apply(**mixture(16, scaled=scaled)) == 9).all()) and len(mixtures) == 1
    kernel.fused_experts = SimpleNamespace(quant_config=SimpleNamespace(quant_dtype=None, w1_scale=None, w2_scale=None))
    assert bool((kernel.apply(**mixture(16)) == 9).all()) and not caplog.records
    for _ in range(2):  # of another version
        assert bool((kernel.apply(**mixture(16), routed_scaling_factor=2.5) == 9).all())
    (line,) = (r.getMessage() for r in caplog.records)
    assert "this mixture of experts is not as" in line and "a mixture has the argument routed_scaling_factor" in line
    of_other = type("OAITritonExperts", (), {"quant_config": property(lambda own: 1 // 0)})()
    experts.quant_config.gemm1_alpha = None
    for other in (of_other, experts):  # a layer that can't be read costs no other one
        unread = modular.FusedMoEKernelModularImpl(prepares, other)
        assert bool((unread.apply(**{**mixture(16, scaled=scaled), "w1": SimpleNamespace()}) == 9).all())
    kernel.fused_experts = experts
    assert bool((kernel.apply(**mixture(16, scaled=scaled)) == 3).all()) and len(caplog.records) == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_sglangs_mixtures(of_mixtures: None, mixtures: list[MixtureOperands], monkeypatch: Patch, scaled: bool) -> None:
    hooks, places, mode = install_sglang(monkeypatch)
    sglang.register()
    hooks.apply_hooks()
    config = SimpleNamespace(activation="silu", routed_scaling_factor=None, no_combine=False, swiglu_limit=None)
    pair = torch.ones(EXPERTS, 2, 1), torch.ones(EXPERTS, 1, 1)
    factors = {"w1_scale": pair[0], "w2_scale": pair[1], "use_fp8_w8a8": True, "block_shape": [128, 128]}

    def ask(tokens: int = 16, **changes: Any) -> float:
        x, w1, w2, weights, ids, *_ = mixture(tokens, scaled=scaled).values()
        routed = Routed(weights, ids)
        given = {"use_int8_w8a8": False, "b1": None, **(factors if scaled else {}), **changes}
        return float(places.fused_moe.fused_experts(x, w1, w2, routed, config, **given).mean())

    assert (ask(), ask(17)) == (3, 8) and (mixtures[0].w1_scale is pair[0]) == scaled
    rows = {"w1_scale": torch.ones(EXPERTS, 256, 1), "w2_scale": torch.ones(EXPERTS, 128, 1), "block_shape": None}
    if scaled:
        assert ask(**rows, per_channel_quant=True) == 3 and mixtures.pop().w1_scale.shape == (EXPERTS, 256)  # type: ignore[union-attr]
        assert ask(**rows) == ask(per_channel_quant=True) == 8
    assert ask(b1=torch.ones(1)) == ask(a1_q=torch.ones(1)) == ask(w1_scale=torch.ones(EXPERTS, 1, 1)) == 8
    for name, value in {"activation": "gelu", "swiglu_limit": 7.0, "no_combine": True}.items():
        before = getattr(config, name)
        setattr(config, name, value)
        assert ask() == 8, name
        setattr(config, name, before)
    config.routed_scaling_factor = 2.5
    assert (ask(), ask(17)) == (7.5, 8)
    mode.is_batch_invariant_mode_enabled = lambda: True
    assert ask() == 8 and len(mixtures) == 2


def test_a_mixture_needs_rows_of_its_m_for_both_products(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(server_calls, "fused_moe", lambda *given, **more: "tuned")
    monkeypatch.setattr(server_calls, "pays", lambda key, prepare: True)
    kinds = iter(["exact", "near", "exact", "range"])
    answers = SimpleNamespace(resolution=SimpleNamespace(kind="", lasting=True, record=None))
    ask = lambda *product: SimpleNamespace(resolution=replace_kind(answers.resolution, next(kinds)))
    monkeypatch.setattr(unloaded, "ask", ask)
    unloaded.expert_weights = frozenset({object()})  # type: ignore[arg-type]
    for tokens, wanted in ((16, "the server"), (16, "the server"), (32, "tuned"), (32, "tuned")):
        assert server_calls.mixture_or(operands(tokens), lambda given: "the server") == wanted
    monkeypatch.setattr(server_calls, "fused_moe", lambda *given, **more: given[3])
    weights = server_calls.mixture_or(operands(32), lambda given: given.x, 2.5)
    assert torch.equal(weights, 2.5 * operands(32).topk_weights)
    routing = torch.ones(32, TOPK), torch.zeros(32, TOPK, dtype=torch.int32)
    assert torch.equal(
        server_calls.mixture_or(operands(32), lambda given: given.x, 2.5, lambda: routing), 2.5 * routing[0]
    )


@pytest.mark.parametrize(("tokens", "holds"), [(16, True), (15, False)])
def test_captured_rows_hold_for_any_spread(unloaded: Dispatcher, monkeypatch: Patch, tokens: int, holds: bool) -> None:
    """A capture knows how rows were spread in its calls, and a call's spread is known to the GPU alone."""
    run_on_cpu(monkeypatch)
    groups = Groups(EXPERTS, spread="captured", counts=(20, 8, 4, 0))
    of = [product("dense", 32, n, k, "bf16", groups=groups) for n, k in ((256, 128), (128, 128))]
    unloaded.load([record(one) for one in of])
    kernels = stand_in_kernels(unloaded._records, dict.fromkeys(of, StandInKernel()))
    unloaded._devices[-1] = unloaded._devices[0] = kernels
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    assert server_calls._holds(operands(tokens)) == holds


def test_the_server_computes_what_it_computes_faster(unloaded: Dispatcher, monkeypatch: Patch, caplog: Caplog) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    times, given, asked = {"tuned": 5.0, "the server": 5.2}, operands(16), list[MixtureOperands]()

    def otherwise(operands: MixtureOperands) -> Any:
        asked.append(operands)
        operands.x.zero_()  # SGLang writes to the tokens
        return "the server"

    monkeypatch.setattr(server_calls, "_holds", lambda operands: True)
    monkeypatch.setattr(server_calls, "fused_moe", lambda *given, **more: "tuned")
    monkeypatch.setattr(server_calls, "_seconds", lambda call: times[call()])
    for capturing, tuned, wanted, races in (
        (True, 5.0, "the server", 0), (False, 5.0, "tuned", 6), (True, 5.0, "tuned", 0), (False, 5.06, "the server", 6),
    ):  # fmt: skip
        if not capturing:
            unloaded.calls.table.clear()
        times["tuned"] = tuned
        given.x.fill_(1.0)
        asked.clear()
        assert server_calls.mixture_or(given, otherwise) == wanted
        assert len(asked) == races + (wanted == "the server") and bool((given.x == 1).all()) == (wanted == "tuned")
    monkeypatch.setenv("TRITONGEMM_LOG", "config")
    unloaded.calls.table.clear()
    with caplog.at_level(logging.INFO, "tritongemm"):
        server_calls.mixture_or(given, otherwise)
    assert "the server computes a mixture of weights (4, 256, 128) with M 32 to 63: tuned 5060000.0 us" in caplog.text
    chosen = asked[0].topk_ids
    assert chosen.shape == given.topk_ids.shape and all(len(set(row.tolist())) == TOPK for row in chosen)
    unloaded.calls.table.clear()
    times.clear()
    monkeypatch.setattr(server_calls, "_seconds", lambda call: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    capturing = False
    assert server_calls.mixture_or(given, otherwise) == "the server" and "full" in caplog.text


def test_a_call_is_timed_behind_enough_work_that_the_host_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers' kernels take the host longer than the GPU: what was timed then was the host."""
    asked: list[int] = []

    class Event(SimpleNamespace):
        record = synchronize = lambda self: None
        query = lambda self: asked[-1] < 8_000_000
        elapsed_time = lambda self, end: 3.0 if self.query() else 0.5

    cuda = SimpleNamespace(
        Event=Event, _sleep=asked.append, get_device_properties=lambda: SimpleNamespace(L2_cache_size=1)
    )
    monkeypatch.setattr(
        server_calls, "torch", SimpleNamespace(cuda=cuda, uint8=None, empty=lambda *_, **__: torch.ones(1))
    )
    calls: list[int] = []
    assert server_calls._seconds(lambda: calls.append(1)) == 0.5e-3 and len(calls) == len(asked) == 3


def replace_kind(resolution: Any, kind: str) -> Any:
    return SimpleNamespace(**{**vars(resolution), "kind": kind})


def test_weights_in_blocks_and_what_a_server_computes_are_counted(tmp_path: Path) -> None:
    w = torch.ones(EXPERTS, 256, 128).to(FP8)
    assert is_in_blocks(w, torch.ones(EXPERTS, 2, 1)) and not is_in_blocks(w, torch.ones(EXPERTS, 2, 1).half())
    assert not is_in_blocks(w.float(), torch.ones(EXPERTS, 2, 1)) and not is_in_blocks(w, torch.ones(EXPERTS))
    from tritongemm.serving.linear_fp8 import BlockOperands

    file = tmp_path / "sizes.yaml"
    weight, scale, x = torch.ones(256, 128).to(FP8), torch.ones(2, 1), torch.ones(5, 128, dtype=torch.bfloat16)
    quantised = torch.ones(5, 128).to(FP8), torch.ones(1, 5).t()
    with tritongemm.capture(str(file)):
        for layer in (BlockOperands(x, weight, scale), BlockOperands(quantised[0], weight, scale, quantised[1])):
            server_calls.product_or(layer, lambda: torch.mm(x, torch.ones(128, 256, dtype=x.dtype)))
        server_calls.mixture_or(operands(16), lambda given: x)
    text = file.read_text()
    assert text.count("a8w8_blockscale") == 2 and '"count": 1' in text, text
    assert "torch.mm" not in text and text.count("groups") >= 2


@pytest.mark.heavy
def test_inductor_calls_what_is_served(unloaded: Dispatcher, monkeypatch: Patch) -> None:
    import torch._inductor.kernel.mm
    from torch._inductor.select_algorithm import extern_kernels

    seen: list[tuple[int, ...]] = []

    def write(calls: Any, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> bool:
        seen.append((*x.shape, *w.shape, w.stride(0), *(() if bias is None else bias.shape), *out.shape))
        out.fill_(3.0)
        return True

    for name in ("mm", "addmm"):
        monkeypatch.setattr(extern_kernels, name, getattr(extern_kernels, name))
    monkeypatch.setattr("tritongemm.serving.tuned_calls.WrittenCalls.write", write)
    compiled.serve_compiled_code()
    w, bias = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)
    layers = torch.compile(lambda x: (functional.linear(x, w), functional.linear(x, w, bias)), dynamic=True)
    with torch.inference_mode():
        for rows in (3, 5):
            assert all(bool((result == 3).all()) for result in layers(torch.randn(rows, 64, dtype=torch.bfloat16)))
    assert seen == [call for m in (3, 5) for call in ((m, 64, 64, 16, 1, m, 16), (m, 64, 64, 16, 1, 16, m, 16))]


@pytest.mark.heavy
def test_inductor_calls_operators_by_name(monkeypatch: Patch) -> None:
    servers.install_vllm_blocks(monkeypatch)
    servers.install_vllm_int4(monkeypatch)
    rows: list[int] = []

    def hook(own: Any, *given: Any) -> Any:
        rows.append(given[0].shape[0])
        return own(*given)

    assert not compiled.stand_before("_C::moved", hook, (0, 1))
    assert all(compiled.stand_before(f"_C::{name}", hook, (1, 2)) for name in ("cutlass_scaled_mm", "marlin_gemm"))
    packed, weight = torch.full((4,), 6, dtype=torch.int32), torch.ones(256, 128).to(FP8)

    def layers(x: Tensor, scale: Tensor, of_weight: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 256)
        torch.ops._C.cutlass_scaled_mm(out, x.to(FP8), weight.t(), scale, of_weight, bias=None)
        return out * torch.ops._C.marlin_gemm(x, None, packed, None, 256).relu()

    traced = torch.compile(layers, dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for m in (3, 5):
            assert bool((traced(torch.ones(m, 128), torch.ones(m, 1), torch.ones(256, 1)) == 24).all())
    assert rows == [3, 3, 5, 5]  # and none while it was traced

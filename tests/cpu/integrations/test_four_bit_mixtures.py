import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cpu.operations.test_four_bit_weights import AWQ_COLUMNS, words
from tests.support.fakes import servers
from tests.support.linear_layers import name_table, record
from tests.support.nouns import Dispatcher, Groups, Patch
from tests.support.patched_layers import CHOSEN as TOPK
from tests.support.patched_layers import EXPERTS, MXFP4, mlp_of_mxfp4, rows_of_mxfp4
from tests.support.products import product
from tritongemm.integrations import int4_layers, loaded_model, sglang, vllm, vllm_w4_experts
from tritongemm.numerics.verify import deviation
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.serving import server_calls

TOKENS, HIDDEN, INNER = MXFP4.x, MXFP4.hidden, MXFP4.inner


def kind(name: str, **facts: Any) -> Any:
    return type(name, (), facts)()


def of_checkpoint(of_bias: str) -> Any:
    experts, layer = mlp_of_mxfp4()[0].experts, nn.Module()
    for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        scale = getattr(experts, f"{ours}_precision_config").weight_scale
        for name, stored in (("weight", getattr(experts, ours)), ("weight_scale", scale)):
            tensor = stored.storage.layout.unswizzle_data(stored.storage.data).mT.contiguous()
            layer.register_parameter(f"{theirs}_{name}", nn.Parameter(tensor, requires_grad=False))
        bias = getattr(experts, f"{ours}_bias").detach().bfloat16()
        layer.register_parameter(f"{theirs}_{of_bias}", nn.Parameter(bias, requires_grad=False))
    return layer


def loaded(method: Any, impl: Any, has_powers: bool = True) -> Any:
    layer = of_checkpoint("bias")
    if not has_powers:
        layer.w2_weight_scale = None
    layer.quant_method = method(impl)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_vllms_own_kernel_chooses_experts_on_a_gpu(monkeypatch: Patch) -> None:
    assert vllm_w4_experts._router() is None, "the stand-in has none"
    behind = list[Any]()  # what some versions return behind both
    monkeypatch.setattr(
        vllm_w4_experts, "_router", lambda: lambda *given, renormalize: (*given[2:], renormalize, *behind)
    )
    for _ in range(2):
        assert vllm_w4_experts._route(kind("Logits", is_cuda=True), 4) == (4, True)
        behind.append(kind("Indices"))


@pytest.mark.parametrize("monolithic", [False, True])
def test_mixtures_are_served(tmp_path: Path, unloaded: Dispatcher, monkeypatch: Patch, monolithic: bool) -> None:
    def mixture_or(operands: MixtureOperands, otherwise: Any, factor: float, route: Any) -> Tensor:
        if operands.x.shape[0] != len(TOKENS):
            result: Tensor = otherwise(operands._replace(topk_ids=torch.zeros_like(operands.topk_ids)))
            return result
        assert (route is not None) == monolithic
        operands = server_calls.with_routing(operands, route) if route else operands
        return MIXTURE.fallback(MIXTURE.check(operands))

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    name_table(tmp_path, monkeypatch, *rows_of_mxfp4("halves_32"))
    servers.install_vllm(monkeypatch), servers.install_vllm_int4(monkeypatch)
    modular = servers.install_vllm_mixtures(monkeypatch)
    for _ in range(2):
        vllm.register()
    suffix = "Monolithic" if monolithic else "Modular"
    experts = kind(
        "OAITritonMxfp4ExpertsMonolithic" if monolithic else "MarlinExperts",
        topk=TOPK, renormalize=True, quant_config=SimpleNamespace(gemm1_clamp_limit=7.0, gemm1_alpha=1.702),
    )  # fmt: skip
    prepare = kind(f"MoEPrepareAndFinalizeNoDPEP{suffix}")
    impl = getattr(modular, f"FusedMoEKernel{suffix}Impl")(prepare, experts)
    method = sys.modules["vllm.model_executor.layers.quantization.mxfp4"].GptOssMxfp4MoEMethod
    layer = loaded(method, impl)
    assert layer.tritongemm_w4_left == "" and layer.w4_down.shape == (EXPERTS, HIDDEN, INNER // 2)
    assert loaded_model.describe(layer).startswith("tuned kernels serve 1 of 1 mixtures of experts of Module; weights")
    exact = mlp_of_mxfp4()[1].double()
    logits = exact.router(TOKENS.double())[0].bfloat16()
    values, ids = logits.float().topk(TOPK)
    wanted = exact.experts(TOKENS.double(), ids, values.softmax(-1).double())

    def call(rows: int, activation: str = "swigluoai", **more: Any) -> Any:
        routing = {"router_logits": logits[:rows]}
        if not monolithic:
            routing = {"topk_weights": values.softmax(-1)[:rows], "topk_ids": ids[:rows].int()}
        given = {"w1": None, "w2": None, "activation": SimpleNamespace(value=activation), **routing, **more}
        return impl.apply(hidden_states=TOKENS[:rows], **given)

    assert deviation(call(len(TOKENS)), wanted) < 4e-2
    others = [call(3), call(6, "silu"), call(6, expert_map=torch.zeros(1)), call(6, apply_router_weight_on_input=True)]
    assert all(bool((one == 9).all()) for one in others)
    unread = loaded(method, getattr(modular, f"FusedMoEKernel{suffix}Impl")(prepare, experts), False)
    assert loaded_model.describe(unread).endswith("itself computes 1 of four bits that is not as it is known")
    monkeypatch.setattr(int4_layers, "has_room", lambda weight, needed: False)
    left = loaded(method, getattr(modular, f"FusedMoEKernel{suffix}Impl")(prepare, experts))
    assert loaded_model.describe(left).endswith(
        "computes 1 of four bits for which too little memory would stay free (TRITONGEMM_FREE)"
    )


AWQ_FACTS = SimpleNamespace(zero_point=True, group_size=32)
GPTQ_FACTS = SimpleNamespace(desc_act=False, group_size=32, weight_bits=4, quant_type=SimpleNamespace(size_bits=4))
COMPRESSED_FACTS = {"num_bits": 4, "actorder": None, "group_size": 32}
# Of each class of vLLM and of SGLang: its facts, and the names of a weight, its factors and zero points.
CLASSES: dict[str, Any] = {
    "CompressedTensorsWNA16MarlinMoEMethod": (
        COMPRESSED_FACTS | {"symmetric": False}, "weight_packed", "weight_scale", "weight_zero_point"
    ),
    "AutoGPTQMoEMethod": ({"quant_config": GPTQ_FACTS}, "qweight", "scales"),
    "AutoAWQMoEMethod": ({"quant_config": AWQ_FACTS}, "qweight", "scales", "qzeros"),
    "CompressedTensorsWNA16MoE": (COMPRESSED_FACTS | {"sym": True}, "weight_packed", "weight_scale"),
    "GPTQMarlinMoEScheme": ({"quant_config": GPTQ_FACTS}, "qweight", "scales"),
    "AWQMoEScheme": ({"quant_config": AWQ_FACTS}, "qweight", "scales", "qzeros"),
}  # fmt: skip
EXTENTS = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
WEIGHTS, IDS = torch.rand(6, TOPK, generator=torch.Generator().manual_seed(9)), torch.arange(12).view(6, TOPK) % EXPERTS


def experts_of_int4(name: str) -> tuple[Any, Tensor]:
    """A layer as a checkpoint has it, and its result for all tokens in float64."""
    _, *names = CLASSES[name]
    layer, exact, random = nn.Module(), [], torch.Generator().manual_seed(4)
    for of, (n, k) in zip(("w13", "w2"), EXTENTS, strict=True):
        numbers = torch.randint(0, 16, (EXPERTS, k, n), generator=random)
        scales = torch.rand(EXPERTS, k // 32, n, generator=random).bfloat16()
        zeros = torch.full(scales.shape, 8)
        if len(names) > 2:
            zeros = torch.randint(0, 16, scales.shape, generator=random)
        exact.append((numbers - zeros.repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1))
        places = AWQ_COLUMNS if "AWQ" in name else list(range(8))
        by_columns = [words(one.unflatten(-1, (-1, 8))[..., places]) for one in (numbers, zeros)]
        weight = by_columns[0] if "AWQ" in name else words(numbers.unflatten(1, (-1, 8)).mT)
        for stored, tensor in zip(names, (weight, scales, by_columns[1]), strict=False):
            layer.register_parameter(f"{of}_{stored}", nn.Parameter(tensor, requires_grad=False))
    h = torch.einsum("th,tehn->ten", TOKENS.double(), exact[0][IDS])
    h = functional.silu(h[..., :INNER]) * h[..., INNER:]
    return layer, (torch.einsum("ten,tenh->teh", h, exact[1][IDS]) * WEIGHTS.double()[..., None]).sum(1)


@pytest.fixture
def asked(tmp_path: Path, unloaded: Dispatcher, monkeypatch: Patch) -> list[MixtureOperands]:
    found = []

    def mixture_or(operands: MixtureOperands, otherwise: Any, factor: float, route: Any = None) -> Tensor:
        found.append(operands)
        return MIXTURE.fallback(MIXTURE.check(operands)) * factor

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    form = {"order": "halves_32", "groups": Groups(EXPERTS)}
    table = [
        record(product("a16w4", 12, n, k, "bf16 int4", f"weight_32{zeros}", **form))
        for n, k in EXTENTS
        for zeros in ("", "_zeros")
    ]
    name_table(tmp_path, monkeypatch, *table)
    return found


@pytest.mark.parametrize("name", list(CLASSES)[:3])
def test_vllms_experts_of_int4_are_served(name: str, asked: list[MixtureOperands], monkeypatch: Patch) -> None:
    servers.install_vllm(monkeypatch), servers.install_vllm_int4(monkeypatch)
    modular = servers.install_vllm_mixtures(monkeypatch)
    vllm.register()
    layer, wanted = experts_of_int4(name)
    experts = kind("MarlinExperts", quant_config=SimpleNamespace())
    impl = modular.FusedMoEKernelModularImpl(kind("MoEPrepareAndFinalizeNoDPEPModular"), experts)
    place = f"vllm.model_executor.layers.quantization.{vllm_w4_experts.METHODS[name][0]}"
    layer.quant_method = getattr(sys.modules[place], name)(impl, **CLASSES[name][0])
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == ""

    def call(rows: int, activation: str = "silu", **more: Any) -> Any:
        given = {"w1": None, "w2": None, "activation": SimpleNamespace(value=activation), **more}
        given |= {"topk_weights": WEIGHTS[:rows], "topk_ids": IDS[:rows].int()}
        return impl.apply(hidden_states=TOKENS[:rows], **given)

    assert deviation(call(6), wanted) < 2e-2 and asked[0].order == "halves_32"
    assert all(bool((one == 9).all()) for one in (call(6, "gelu"), call(6, expert_map=torch.zeros(1))))


class Routed(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Any = None


class Dispatched(NamedTuple):
    hidden_states: Tensor
    topk_output: Any


@pytest.mark.parametrize("name", list(CLASSES)[3:])
def test_sglangs_experts_of_int4_are_served(name: str, asked: list[MixtureOperands], monkeypatch: Patch) -> None:
    hooks, *_ = servers.install_sglang(monkeypatch)
    scheme = servers.install_sglang_experts(monkeypatch)[name](**CLASSES[name][0])
    sglang.register()
    hooks.apply_hooks()
    layer, wanted = experts_of_int4(name)
    layer.moe_runner_config = SimpleNamespace(activation="silu", routed_scaling_factor=2.0)
    dispatched = Dispatched(TOKENS, Routed(WEIGHTS, IDS.int()))
    scheme.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == ""
    assert deviation(scheme.apply_weights(layer, dispatched).hidden_states, 2 * wanted) < 2e-2
    kept = layer.w4_gate_up.data_ptr()  # which graphs read
    for stored, parameter in experts_of_int4(name)[0].named_parameters():
        layer.register_parameter(stored, parameter)
    scheme.process_weights_after_loading(layer)
    assert layer.w4_gate_up.data_ptr() == kept
    for change in ({"activation": "gelu"}, {"swiglu_limit": 7.0}):
        layer.moe_runner_config = SimpleNamespace(**{"activation": "silu", **change})
        assert bool((scheme.apply_weights(layer, dispatched).hidden_states == 9).all())
    layer.moe_runner_config, layer.moe_ep_size = SimpleNamespace(activation="silu"), 2
    assert bool((scheme.apply_weights(layer, dispatched).hidden_states == 9).all())


class Sorted(NamedTuple):
    routing_data: Any
    gather_indx: Any
    scatter_indx: Any


def test_sglangs_experts_of_mxfp4_are_served(tmp_path: Path, unloaded: Dispatcher, monkeypatch: Patch) -> None:
    raced = list[Any]()

    def mixture_or(operands: MixtureOperands, otherwise: Any, factor: float, route: Any) -> Tensor:
        raced.append(operands := server_calls.with_routing(operands, route))
        if operands.x.shape[0] != len(TOKENS):
            result: Tensor = otherwise(operands._replace(topk_ids=operands.topk_ids.flip(1)))
            return result
        return MIXTURE.fallback(MIXTURE.check(operands))

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    name_table(tmp_path, monkeypatch, *rows_of_mxfp4("halves_32"))
    hooks, *_ = servers.install_sglang(monkeypatch)
    method = servers.install_sglang_experts(monkeypatch)["Mxfp4MoEMethod"](use_triton_kernels=True)
    sglang.register()
    hooks.apply_hooks()
    layer, exact = of_checkpoint("weight_bias"), mlp_of_mxfp4()[1].double()
    config = dict(activation="silu", gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    layer.moe_runner_config = SimpleNamespace(**config)
    method.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == ""
    logits = exact.router(TOKENS.double())[0].bfloat16().float()
    values, ids = logits.topk(TOPK)
    wanted = exact.experts(TOKENS.double(), ids, values.softmax(-1).double())

    def call(rows: int) -> Any:
        routed = Sorted(*servers.sort_by_experts(logits[:rows], TOPK))
        return method.apply(layer, Dispatched(TOKENS[:rows], routed)).hidden_states

    assert deviation(call(len(TOKENS)), wanted) < 4e-2 and torch.equal(raced[0].topk_ids, ids.int())
    assert bool((call(3) == 9).all()) and len(raced) == 2
    for change in ({"gemm1_alpha": 1.0}, {"no_combine": True}):
        layer.moe_runner_config = SimpleNamespace(**{**config, **change})
        assert bool((call(len(TOKENS)) == 9).all()) and len(raced) == 2
    method.use_triton_kernels = False
    method.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == "of mxfp4 on other kernels than OpenAI's"


def test_experts_of_other_packings_are_counted() -> None:
    layer = nn.Module()
    layer.w13_weight_packed, layer.quant_method = torch.zeros(1), kind("CompressedTensorsWNA16MoEMethod")
    assert loaded_model.describe(layer) == (
        "tuned kernels serve 0 of 1 mixtures of experts of Module; the server itself computes 1 of "
        "CompressedTensorsWNA16MoEMethod"
    )

"""vLLM's mixtures with weights of four bits: experts are converted before vLLM converts them, and served where rows
hold.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cpu.operations.test_four_bit_weights import AWQ_COLUMNS, words
from tests.cpu.serving.test_patch_gpt_oss import EXPERTS, HIDDEN, INNER, TOPK, X, mlp_of_mxfp4, rows
from tests.support.fakes.servers import install_vllm, install_vllm_int4, install_vllm_mixtures
from tests.support.linear_layers import record
from tritongemm.core.group_rows import Groups
from tritongemm.core.problem import Problem, matrices
from tritongemm.formats import results_format
from tritongemm.integrations import int4_layers, loaded_model, vllm, vllm_w4_experts
from tritongemm.numerics.verify import deviation
from tritongemm.operations.mixture import MIXTURE, MixtureOperands
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import server_calls
from tritongemm.serving.dispatcher import Dispatcher

TOKENS = X.view(-1, HIDDEN)


def kind(name: str, **facts: Any) -> Any:
    return type(name, (), facts)()


def loaded(method: Any, impl: Any, has_powers: bool = True) -> Any:
    """A layer whose weights vLLM has loaded."""
    experts, layer = mlp_of_mxfp4()[0].experts, nn.Module()
    for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        scale = getattr(experts, f"{ours}_precision_config").weight_scale
        for name, stored in (("weight", getattr(experts, ours)), ("weight_scale", scale)):
            tensor = stored.storage.layout.unswizzle_data(stored.storage.data).mT.contiguous()
            layer.register_parameter(f"{theirs}_{name}", nn.Parameter(tensor, requires_grad=False))
        bias = getattr(experts, f"{ours}_bias").detach().bfloat16()
        layer.register_parameter(f"{theirs}_bias", nn.Parameter(bias, requires_grad=False))
    if not has_powers:
        layer.w2_weight_scale = None
    layer.quant_method = method(impl)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("monolithic", [False, True])
def test_mixtures_with_rows_are_served(
    tmp_path: Path, unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch, monolithic: bool
) -> None:
    def mixture_or(operands: MixtureOperands, otherwise: Any, factor: float, route: Any) -> Tensor:
        if operands.x.shape[0] != len(TOKENS):
            spread = operands._replace(topk_ids=torch.zeros_like(operands.topk_ids))
            result: Tensor = otherwise(spread)
            return result
        assert (route is not None) == monolithic
        return MIXTURE.fallback(MIXTURE.check(operands))

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    file = tmp_path / "tuned.yaml"
    file.write_text(results_format().write(rows("halves_32")), encoding="utf-8")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    install_vllm(monkeypatch), install_vllm_int4(monkeypatch)
    modular = install_vllm_mixtures(monkeypatch)
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
        "computes 1 of four bits that would leave less than half of the GPU's memory"
    )


NAMES: dict[str, Any] = {  # facts of each class, and the names of a weight, its factors and zero points
    "CompressedTensorsWNA16MarlinMoEMethod": (
        {"num_bits": 4, "actorder": None, "symmetric": False}, "weight_packed", "weight_scale", "weight_zero_point"
    ),
    "AutoGPTQMoEMethod": (
        {"quant_config": SimpleNamespace(desc_act=False, quant_type=SimpleNamespace(size_bits=4))}, "qweight", "scales"
    ),
    "AutoAWQMoEMethod": ({"quant_config": SimpleNamespace(zero_point=True)}, "qweight", "scales", "qzeros"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_int4_are_served(
    name: str, tmp_path: Path, unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, *names = NAMES[name]
    asked, extents = [], ((2 * INNER, HIDDEN), (HIDDEN, INNER))

    def mixture_or(operands: MixtureOperands, otherwise: Any, factor: float, route: Any) -> Tensor:
        asked.append(operands)
        return MIXTURE.fallback(MIXTURE.check(operands))

    monkeypatch.setattr(server_calls, "mixture_or", mixture_or)
    of_zeros = "_zeros" * (len(names) > 2)
    operands = matrices("bf16", "int4", "bf16", layout="TN", order="halves_32")
    plain = [Problem(12, n, k, *operands, groups=Groups(EXPERTS)) for n, k in extents]
    table = [record(registry.get(Family, "a16w4").problem(one, f"weight_32{of_zeros}")) for one in plain]
    file = tmp_path / "tuned.yaml"
    file.write_text(results_format().write(table), encoding="utf-8")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    install_vllm(monkeypatch), install_vllm_int4(monkeypatch)
    modular = install_vllm_mixtures(monkeypatch)
    vllm.register()
    layer, exact, random = nn.Module(), [], torch.Generator().manual_seed(4)
    for of, (n, k) in zip(("w13", "w2"), extents, strict=True):
        numbers = torch.randint(0, 16, (EXPERTS, k, n), generator=random)
        scales = torch.rand(EXPERTS, k // 32, n, generator=random).bfloat16()
        zeros = torch.randint(0, 16, scales.shape, generator=random) if of_zeros else torch.full(scales.shape, 8)
        exact.append((numbers - zeros.repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1))
        places = AWQ_COLUMNS if name == "AutoAWQMoEMethod" else list(range(8))
        by_columns = [words(one.unflatten(-1, (-1, 8))[..., places]) for one in (numbers, zeros)]
        weight = by_columns[0] if places is AWQ_COLUMNS else words(numbers.unflatten(1, (-1, 8)).mT)
        for stored, tensor in zip(names, (weight, scales, by_columns[1]), strict=False):
            layer.register_parameter(f"{of}_{stored}", nn.Parameter(tensor, requires_grad=False))
    experts = kind("MarlinExperts", quant_config=SimpleNamespace())
    impl = modular.FusedMoEKernelModularImpl(kind("MoEPrepareAndFinalizeNoDPEPModular"), experts)
    place = f"vllm.model_executor.layers.quantization.{vllm_w4_experts.METHODS[name][0]}"
    layer.quant_method = getattr(sys.modules[place], name)(impl, **facts)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == ""
    weights, ids = torch.rand(6, TOPK, generator=random), torch.arange(12).view(6, TOPK) % EXPERTS
    h = torch.einsum("th,tehn->ten", TOKENS.double(), exact[0][ids])
    h = functional.silu(h[..., :INNER]) * h[..., INNER:]
    wanted = (torch.einsum("ten,tenh->teh", h, exact[1][ids]) * weights.double()[..., None]).sum(1)

    def call(rows: int, activation: str = "silu", **more: Any) -> Any:
        given = {"w1": None, "w2": None, "activation": SimpleNamespace(value=activation), **more}
        given |= {"topk_weights": weights[:rows], "topk_ids": ids[:rows].int()}
        return impl.apply(hidden_states=TOKENS[:rows], **given)

    assert deviation(call(6), wanted) < 2e-2 and asked[0].order == "halves_32"
    assert all(bool((one == 9).all()) for one in (call(6, "gelu"), call(6, expert_map=torch.zeros(1))))


def test_experts_of_other_packings_are_counted() -> None:
    layer = nn.Module()
    layer.w13_weight_packed, layer.quant_method = torch.zeros(1), kind("CompressedTensorsWNA16MoEMethod")
    assert loaded_model.describe(layer) == (
        "tuned kernels serve 0 of 1 mixtures of experts of Module; the server itself computes 1 of "
        "CompressedTensorsWNA16MoEMethod"
    )

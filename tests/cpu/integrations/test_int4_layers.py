import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.operations import test_four_bit_weights as bits
from tests.cpu.operations.test_four_bit_weights import COMPRESSED, GPTQ, GROUP, HALF, NUMBERS, OF_COMPRESSED, K, N
from tests.support.fakes.servers import install_sglang, install_sglang_int4, install_vllm, install_vllm_int4
from tests.support.linear_layers import name_table, record
from tests.support.nouns import Caplog, Dispatcher, Patch
from tests.support.patched_layers import row_of_int4 as rows
from tests.support.products import product
from tritongemm.integrations import int4_layers, loaded_model, process, sglang, vllm
from tritongemm.numerics.verify import deviation
from tritongemm.operations.linear_w4 import FOUR_BIT_LAYER, FourBitOperands
from tritongemm.serving import server_calls

EXACT = (NUMBERS - 8) * HALF.double().t().repeat_interleave(GROUP, 1)


def number(zero_points: bool) -> Any:
    return SimpleNamespace(
        size_bits=4, bias=8, has_bias=lambda: not zero_points, is_floating_point=bool, is_signed=bool
    )


class LinearBase(nn.Module):  # type: ignore[misc]
    def __init__(self, kind: Any, zero_points: bool = False, of_gptq: bool = False, **facts: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(N).bfloat16(), requires_grad=False)
        self.qweight = nn.Parameter(GPTQ if of_gptq else COMPRESSED, requires_grad=False)
        self.scales = nn.Parameter((HALF if of_gptq else HALF.t()).clone(), requires_grad=False)
        if zero_points:
            self.qzeros = nn.Parameter(OF_COMPRESSED, requires_grad=False)
        for parameter in self.parameters():
            parameter.output_dim = int(of_gptq)
        if zero_points:
            self.qzeros.output_dim = 0
        config = {"weight_type": number(zero_points), "act_type": torch.bfloat16, "partition_weight_shape": (K, N)}
        config |= {"zero_points": zero_points, "has_g_idx": False} | facts
        self.kernel = kind(SimpleNamespace(**config))
        self.quant_method = SimpleNamespace(kernel=self.kernel)

    def load(self) -> Any:
        self.kernel.process_weights_after_loading(self)
        return self

    def forward(self, x: Tensor) -> Any:
        return self.kernel.apply_weights(self, x, self.bias)


def layer_of_nvfp4() -> tuple[Any, Tensor]:
    """A layer as modelopt has it, but for the factor of all, and its weight in float64."""
    numbers = torch.randint(0, 16, (32, K), generator=torch.Generator().manual_seed(2))
    scale, layer = torch.rand(32, K // 16).to(torch.float8_e4m3fn), nn.Module()
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    exact = torch.where(numbers < 8, 1, -1) * magnitudes[numbers % 8] * scale.double().repeat_interleave(16, 1)
    layer.weight = nn.Parameter((numbers[:, ::2] | numbers[:, 1::2] << 4).byte(), requires_grad=False)
    layer.weight_scale, layer.bias, layer.params_dtype = nn.Parameter(scale, requires_grad=False), None, torch.bfloat16
    layer.output_size_per_partition = layer.n = 32
    return layer, exact * 0.5


@pytest.fixture
def table(tmp_path: Path, unloaded: Dispatcher, monkeypatch: Patch) -> Dispatcher:
    def four_bits_or(operands: FourBitOperands, otherwise: Any) -> Tensor:
        if operands.x.shape[0] != 4:
            result: Tensor = otherwise()
            return result
        return FOUR_BIT_LAYER.fallback(FOUR_BIT_LAYER.check(operands))

    monkeypatch.setattr(server_calls, "four_bits_or", four_bits_or)
    of_int4 = rows("halves_32"), rows("halves_32", m=8), rows(), rows(more="_zeros")
    of_nvfp4 = record(product("a16w4", 4, 32, K, "bf16 fp4e2m1", "weight_16", order="fragments"))
    name_table(tmp_path, monkeypatch, *of_int4, of_nvfp4)
    return unloaded


@pytest.fixture
def kinds(table: Dispatcher, monkeypatch: Patch) -> tuple[Any, Any]:
    install_vllm(monkeypatch)
    found = install_vllm_int4(monkeypatch)
    for _ in range(2):
        vllm.register()
    return found


def test_layers_with_a_row_are_served_and_the_servers_kernel_computes_the_rest(kinds: tuple[Any, Any]) -> None:
    kind, other = kinds
    layers = [LinearBase(kind).load(), LinearBase(kind, of_gptq=True).load(), LinearBase(kind, zero_points=True).load()]
    x, bias = torch.randn(4, K).bfloat16(), torch.arange(N).double()
    for layer in layers:
        if layer is layers[2]:
            zeros = layer.tritongemm_w4_scale[:, 1].double() + 8
            exact = (NUMBERS - zeros.t().repeat_interleave(GROUP, 1)) * HALF.double().t().repeat_interleave(GROUP, 1)
        else:
            exact = EXACT
            assert layer.tritongemm_w4_order == "halves_32"
        for call in (layer, torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)):
            assert deviation(call(x), x.double() @ exact.t() + bias) < 1e-2
            assert torch.equal(call(x[:3]), (6 + bias).bfloat16().expand(3, N))
    assert layers[0].state_dict().keys() == {"bias", "qweight", "scales"}
    kept = layers[0].tritongemm_w4_weight.data_ptr()
    again = LinearBase(kind)
    layers[0].qweight, layers[0].scales = again.qweight, again.scales
    assert layers[0].load().tritongemm_w4_weight.data_ptr() == kept  # which graphs read
    left = [
        LinearBase(other), LinearBase(kind, has_g_idx=True), LinearBase(kind, act_type=torch.int8),
        LinearBase(kind, partition_weight_shape=(K, 8)),
    ]  # fmt: skip
    for layer in left:
        layer.load()
        assert bool((layer.kernel.apply_weights(layer, x) == 6).all())
    assert loaded_model.describe(nn.ModuleList([*layers, *left])) == (
        "tuned kernels serve 3 of 7 linear layers of ModuleList; the server itself computes 1 of HummingLinearKernel, "
        f"1 of int4 with desc_act, 1 of int4 with activations of torch.int8, 1 with no row of int4 for N=8, K={K}; "
        "weights of four bits are kept in the tables' order too, 0 MiB"
    )


def test_vllms_layers_of_nvfp4_are_served_and_refused_weights_stay(kinds: tuple[Any, Any]) -> None:
    kernel = pkgutil.resolve_name("vllm.model_executor.kernels.linear:_POSSIBLE_NVFP4_KERNELS")["CUDA"][0]()
    layer, exact = layer_of_nvfp4()
    layer.weight_global_scale, x = nn.Parameter(torch.tensor(0.5), requires_grad=False), torch.randn(4, K).bfloat16()
    kernel.process_weights_after_loading(layer)
    assert layer.tritongemm_w4_left == "" and layer.tritongemm_w4_order == "fragments"
    call = lambda given: kernel.apply_weights(layer, given, None)
    for each in (call, torch.compile(call, fullgraph=True, backend="eager", dynamic=True)):
        assert deviation(each(x), x.double() @ exact.t()) < 1e-2 and bool((each(x[:3]) == 6).all())
    layer = LinearBase(kinds[0])
    layer.scales.data[0, 0] = float("nan")
    layer.load()
    assert layer.tritongemm_w4_left.startswith("of int4 that is refused: the scale factors hold NaN")
    assert torch.equal(layer(torch.ones(4, K).bfloat16())[0], (6 + torch.arange(N)).bfloat16())


@pytest.mark.parametrize("name", ["ModelOptFp4LinearMethod", "ModelOptNvFp4A16LinearMethod"])
def test_sglangs_layers_of_nvfp4_are_served(name: str, table: Dispatcher, monkeypatch: Patch) -> None:
    hooks, *_ = install_sglang(monkeypatch)
    method = install_sglang_int4(monkeypatch)[name](quant_config=SimpleNamespace())
    sglang.register()
    hooks.apply_hooks()
    layer, exact = layer_of_nvfp4()
    layer.weight_scale_2, x = nn.Parameter(torch.tensor([0.5, 0.5])), torch.randn(4, K).bfloat16()
    method.process_weights_after_loading(layer)
    assert deviation(method.apply(layer, x, None), x.double() @ exact.t()) < 1e-2
    assert bool((method.apply(layer, x[:3], None) == 6).all())
    again, _ = layer_of_nvfp4()
    again.weight_scale_2, method.quant_config.is_awq = nn.Parameter(torch.ones(1)), True
    method.process_weights_after_loading(again)
    assert again.tritongemm_w4_left == "of nvfp4 with factors for columns of activations"


def test_sglangs_schemes_are_served_and_marlin_computes_the_rest(table: Dispatcher, monkeypatch: Patch) -> None:
    registry, _, mode = install_sglang(monkeypatch)
    schemes = install_sglang_int4(monkeypatch)
    for _ in range(2):
        sglang.register()
    registry.apply_hooks()
    config = dict(partition_weight_shape=(K, N), zero_points=False, has_g_idx=False, weight_type=number(False))
    kernel_config = SimpleNamespace(**config)
    x, zero = torch.randn(4, K).bfloat16(), bits.ZEROS.t().repeat_interleave(GROUP, 1)
    factors = HALF.double().t().repeat_interleave(GROUP, 1)
    cases = [
        ("GPTQMarlinLinearScheme", {"kernel": SimpleNamespace(kernel_config=kernel_config)}, EXACT,
         {"qweight": GPTQ, "scales": HALF}),
        ("AWQMarlinLinearScheme", {"quant_config": SimpleNamespace(quant_type=number(True))},
         (NUMBERS - zero) * factors, {"qweight": bits.AWQ, "scales": HALF, "qzeros": bits.OF_AWQ}),
        ("CompressedTensorsWNA16", {"kernel_config": kernel_config}, EXACT,
         {"weight_packed": COMPRESSED, "weight_scale": HALF.t()}),
    ]  # fmt: skip
    for name, facts, exact, tensors in cases:
        layer, scheme = nn.Module(), schemes[name](**facts)
        layer.n = N
        for key, tensor in tensors.items():
            layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        scheme.process_weights_after_loading(layer)
        assert layer.tritongemm_w4_left == ""
        assert deviation(scheme.apply_weights(layer, x, None), x.double() @ exact.t()) < 1e-2, name
        assert bool((scheme.apply_weights(layer, x[:3], None) == 6).all())
        mode.is_batch_invariant_mode_enabled = lambda: True
        assert bool((scheme.apply_weights(layer, x, None) == 6).all())
        mode.is_batch_invariant_mode_enabled = lambda: False


@pytest.mark.parametrize(("share", "fits"), [("", 50), ("0.25", 75), ("0", 100)])
def test_a_share_of_the_memory_stays_free(share: str, fits: int, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_FREE", share)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100))
    weight: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    assert int4_layers.has_room(weight, fits) and not int4_layers.has_room(weight, fits + 1)


@pytest.mark.parametrize("share", ["half", "1.5", "-1", "0:1"])
def test_a_share_that_is_none_is_named(share: str, table: Dispatcher, monkeypatch: Patch, caplog: Caplog) -> None:
    monkeypatch.setenv("TRITONGEMM_FREE", share)
    assert process.start_serving("vllm") == ""
    assert caplog.messages[-1].startswith(
        "TRITONGEMM_FREE must be a share of the GPU's memory from 0 to 1, as 0.5, not"
    )

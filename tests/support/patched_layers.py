"""Layers of every kind that `patch` serves, small and with random weights: what they are given and give, and rows."""

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cpu.operations import test_four_bit_weights as bits
from tests.cpu.operations.test_four_bit_weights import GROUP, GROUPS, HALF, K, N, filled
from tests.support.linear_layers import problem, record
from tests.support.nouns import Groups, Record
from tests.support.products import FP4, FP8, product
from tritongemm.operations.factors import find_scalings, spread
from tritongemm.operations.linear_w4 import dequantize

EXPERTS, HIDDEN, INNER, CHOSEN = 4, 128, 128, 2


class LayerCase(NamedTuple):
    """A layer, its arguments, its result in float64, rows that serve it, and how far its result may be off."""

    layer: Any
    given: tuple[Tensor, ...]
    exact: Tensor
    rows: list[Record]
    limit: float = 0.02


def fp8() -> Any:
    """The module of transformers' fp8 classes: its import takes seconds, and only who runs these tests needs it."""
    return pytest.importorskip("transformers.integrations.finegrained_fp8")


def fp8_linear(n: int, k: int, **options: Any) -> Any:
    made = fp8().FP8Linear(k, n, block_size=(128, 128), **options)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k))
        made.weight_scale_inv.copy_(torch.rand(-(-n // 128), -(-k // 128)) * 0.05 + 0.01)
        if made.bias is not None:
            made.bias.copy_(torch.randn(n))
    return made


def dequantised(of: Any) -> Tensor:
    scale = of.weight_scale_inv.detach()
    scaling = next(found for found in find_scalings(scale, *of.weight.shape) if found.depth)
    return of.weight.detach().double() * spread(scale, scaling, *of.weight.shape)


def row_of_fp8(n: int, k: int) -> Record:
    return record(product("a8w8_blockscale", 16, n, k, FP8))


def modeling() -> Any:
    return pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")


def qwen_config(activation: str = "silu") -> Any:
    extents = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts_per_tok": CHOSEN}
    made = modeling().Qwen3MoeConfig(num_experts=EXPERTS, hidden_act=activation, **extents)
    made._experts_implementation = "eager"
    return made


def experts(activation: str = "silu") -> Any:
    torch.manual_seed(0)
    made = modeling().Qwen3MoeExperts(qwen_config(activation)).bfloat16()
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.1)
    return made


def fp8_experts(of: Any) -> Any:
    """The same weights in fp8, a factor of 2 ** -8 for each block."""
    made = fp8().FP8Experts(qwen_config(), block_size=(128, 128))
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(of, name).detach()
        factors = torch.full((EXPERTS, weight.shape[1] // 128, weight.shape[2] // 128), 2.0**-8)
        setattr(made, name, nn.Parameter((weight.float() * 2**8).to(torch.float8_e4m3fn), requires_grad=False))
        setattr(made, f"{name}_scale_inv", nn.Parameter(factors))
    return made


def rows_of_experts(is_fp8: bool = False) -> list[Record]:
    family, types = ("a8w8_blockscale", FP8) if is_fp8 else ("dense", "bf16")
    extents = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    return [record(product(family, 8, n, k, types, groups=Groups(EXPERTS))) for n, k in extents]


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.rand(5, EXPERTS).topk(CHOSEN)[1]
    return torch.randn(5, HIDDEN, dtype=torch.bfloat16), ids, torch.rand(5, CHOSEN, dtype=torch.bfloat16)


MXFP4 = SimpleNamespace(
    hidden=64, inner=96, x=torch.randn(6, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
)


def stored(of_k: Tensor) -> Any:
    """What triton_kernels calls a tensor, of [experts, N, along K]: turned, in a layout of its own."""
    layout = SimpleNamespace(unswizzle_data=lambda data: data.flip(0))
    return SimpleNamespace(storage=SimpleNamespace(data=of_k.mT.flip(0), layout=layout))


def mlp_of_mxfp4() -> tuple[Any, Any]:
    """A layer with its experts in mxfp4, and the same in bfloat16, to which transformers dequantises it."""
    from transformers import GptOssConfig
    from transformers.integrations import mxfp4
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    hidden, inner, generator = MXFP4.hidden, MXFP4.inner, torch.Generator().manual_seed(7)
    extents = {"hidden_size": hidden, "intermediate_size": inner, "num_experts_per_tok": CHOSEN}
    config = GptOssConfig(num_local_experts=EXPERTS, **extents)
    config._experts_implementation = "eager"
    exact, made = GptOssMLP(config).bfloat16(), mxfp4.Mxfp4GptOssExperts(config)
    for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 127, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        bias = torch.randn(EXPERTS, n, generator=generator)
        del made._parameters[name]
        setattr(made, name, stored(blocks.flatten(-2)))
        setattr(made, f"{name}_precision_config", SimpleNamespace(weight_scale=stored(scales)))
        getattr(made, f"{name}_bias").data.copy_(bias)
        getattr(exact.experts, name).data.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))
        getattr(exact.experts, f"{name}_bias").data.copy_(bias)
    for parameter in exact.router.parameters():
        nn.init.normal_(parameter, generator=generator)
    return mxfp4.Mxfp4GptOssMLP(exact.router, made), exact


def rows_of_mxfp4(order: str = "plain") -> list[Record]:
    extents, form = ((2 * MXFP4.inner, MXFP4.hidden), (MXFP4.hidden, MXFP4.inner)), {"order": order}
    of = (product("a16w4", 12, n, k, f"bf16 {FP4}", "weight_mx", groups=Groups(EXPERTS), **form) for n, k in extents)
    return [record(one) for one in of]


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, bias: bool = False, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())
        self.bias = nn.Parameter(torch.randn(N).half()) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the library's own product was called")


class TorchQuantLinear(_Layer):
    bits, version = 4, 1

    def qzero_format(self) -> int:
        return self.version


class MarlinQuantLinear(_Layer):
    in_features = K


class WQLinear_GEMM(_Layer):
    w_bit = 4


class CompressedLinear(_Layer):
    pass


FACTORS = HALF.t()


def compressed_linear(packed: Tensor = bits.COMPRESSED, factors: Tensor = FACTORS, **scheme: Any) -> nn.Linear:
    """A layer of compressed-tensors 0.17: a plain one with other tensors, a forward of its own and a scheme."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight)

    made, home = nn.Linear(K, N, bias=False), {**globals(), "__name__": "compressed_tensors.quantization"}
    del made.weight
    for name, tensor in (("weight_packed", packed), ("weight_scale", factors)):
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    made.forward = FunctionType(forward.__code__, home).__get__(made)
    made.quantization_scheme = SimpleNamespace(**{"input_activations": None, "weights": None} | scheme)
    return made


for kind, home in (
    (TorchQuantLinear, "gptqmodel.nn_modules.qlinear.torch"),
    (MarlinQuantLinear, "gptqmodel.nn_modules.qlinear.marlin"),
    (WQLinear_GEMM, "awq.modules.linear.gemm"),
    (CompressedLinear, "compressed_tensors.linear.compressed_linear"),
):
    kind.__module__ = home


def row_of_int4(order: str = "plain", group: int = GROUP, m: int = 4, bias: str = "none", more: str = "") -> Record:
    return record(product("a16w4", m, N, K, "bf16 int4", f"weight_{group}{more}", order=order, bias=bias))


def gptq(zeros: int = 0x77777777, bias: bool = False, version: int = 1) -> TorchQuantLinear:
    index = torch.arange(K, dtype=torch.int32) // GROUP
    made = TorchQuantLinear(
        bias, qweight=bits.GPTQ, qzeros=filled(zeros, GROUPS, N // 8), scales=HALF.half(), g_idx=index
    )
    made.version = version
    return made


def autoround(module: str, zeros: int) -> _Layer:
    kind: type[_Layer] = type(
        "QuantLinear", (_Layer,), {"__module__": f"auto_round_extension.triton.{module}", "bits": 4}
    )
    return kind(qweight=bits.GPTQ, qzeros=filled(zeros, GROUPS, N // 8), scales=HALF.half())


X = torch.randn(3, K, generator=torch.Generator().manual_seed(3)).bfloat16()


def _of_int4(layer: Any) -> LayerCase:
    weight = (bits.NUMBERS - 8) * HALF.double().t().repeat_interleave(GROUP, 1)
    exact = X.double() @ weight.t() + (0 if layer.bias is None else layer.bias.detach().double())
    return LayerCase(layer, (X,), exact, [row_of_int4("halves_32"), row_of_int4("halves_32", m=8), row_of_int4()])


def marlin(**more: Any) -> MarlinQuantLinear:
    numbers = torch.randint(0, 16, (K, 64), generator=torch.Generator().manual_seed(8))
    none = torch.empty(0, dtype=torch.int32)
    made = MarlinQuantLinear(qweight=bits.of_marlin(numbers), scales=torch.full((4, 64), 0.25).bfloat16(), qzeros=none)
    made.__dict__.update(numbers=numbers, **more)
    return made


def of_marlin() -> LayerCase:
    layer = marlin()
    row = record(product("a16w4", 4, 64, K, "bf16 int4", f"weight_{K // 4}", order="fragments"))
    return LayerCase(layer, (X,), X.double() @ (layer.numbers - 8.0).double() / 4, [row])


def of_nvfp4() -> LayerCase:
    numbers = torch.randint(0, 256, (16, K // 2), dtype=torch.uint8)
    scale = torch.randint(1, 9, (16, K // 16)).to(torch.float8_e4m3fn)
    layer = CompressedLinear(weight_packed=numbers, weight_scale=scale, weight_global_scale=torch.tensor([64.0]))
    exact = X.double() @ dequantize(numbers, scale.bfloat16().t() / 64, "plain", torch.float64).t()
    row = record(product("a16w4", 4, 16, K, f"bf16 {FP4}", "weight_16", order="fragments"))
    return LayerCase(layer, (X,), exact, [row])


def of_mxfp4() -> LayerCase:
    numbers = torch.randint(0, 256, (16, K // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    powers = torch.arange(16 * K // 32).view(16, K // 32).add(96).to(torch.uint8)
    exact = X.double() @ dequantize(numbers, powers, "plain", torch.float64).t()
    row = record(product("a16w4", 4, 16, K, f"bf16 {FP4}", "weight_mx", order="fragments"))
    return LayerCase(compressed_linear(numbers, powers), (X,), exact, [row])


def _plain() -> LayerCase:
    layer, x = nn.Linear(64, 96).bfloat16(), torch.randn(5, 64).bfloat16()
    exact = functional.linear(x.double(), layer.weight.detach().double(), layer.bias.detach().double())
    return LayerCase(layer, (x,), exact, [record(problem(m, 96, 64, "n")) for m in (1, 16)])


def _fp8() -> LayerCase:
    layer, x = fp8_linear(300, 256, has_bias=True), torch.randn(5, 256)
    return LayerCase(layer, (x,), x.double() @ dequantised(layer).T + layer.bias.detach(), [row_of_fp8(300, 256)], 0.2)


def _experts(is_fp8: bool) -> LayerCase:
    layer, given = experts(), tokens()
    with torch.no_grad():
        exact = layer(*given).double()
    return LayerCase(fp8_experts(layer) if is_fp8 else layer, given, exact, rows_of_experts(is_fp8), 0.2)


def _mxfp4(order: str) -> LayerCase:
    """Gate and up are rounded to bfloat16 before they are clamped."""
    layer, exact = mlp_of_mxfp4()
    with torch.no_grad():
        values, ids = exact.router(MXFP4.x)[0].float().topk(CHOSEN)
        given = MXFP4.x, ids, values.softmax(-1).bfloat16()
        wanted = exact.double().experts(given[0].double(), ids, given[2].double())
    return LayerCase(layer.experts, given, wanted, rows_of_mxfp4(order), 4e-2)


KINDS: dict[str, Callable[[], LayerCase]] = {
    "linear": _plain,
    "fp8": _fp8,
    "experts": lambda: _experts(False),
    "experts of fp8": lambda: _experts(True),
    "experts of mxfp4": lambda: _mxfp4("plain"),
    "experts of mxfp4 in halves": lambda: _mxfp4("halves_32"),
    "gptq": lambda: _of_int4(gptq(bias=True)),
    "gptq_v2": lambda: _of_int4(gptq(bits.EIGHTS, version=2)),
    "autoround": lambda: _of_int4(autoround("qlinear_tritonv2", bits.EIGHTS)),
    "autoround less one": lambda: _of_int4(autoround("qlinear_tritonv2_zp", 0x77777777)),
    "awq": lambda: _of_int4(WQLinear_GEMM(qweight=bits.AWQ, qzeros=filled(bits.EIGHTS, GROUPS, N // 8), scales=HALF)),
    "marlin": of_marlin,
    "compressed-tensors": lambda: _of_int4(compressed_linear()),
    "nvfp4": of_nvfp4,
    "mxfp4": of_mxfp4,
}

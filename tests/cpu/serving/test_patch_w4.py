"""`patch` on layers of int4: stand-ins of the classes that load GPTQ, AWQ and compressed-tensors checkpoints."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.cpu.operations.test_four_bit_weights import (
    AWQ,
    COMPRESSED,
    EIGHTS,
    GPTQ,
    GROUP,
    GROUPS,
    HALF,
    NUMBERS,
    SCALES,
    K,
    N,
    filled,
)  # fmt: skip
from tests.support.linear_layers import record
from tests.support.served_region import Graphs
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem, matrices
from tritongemm.numerics.verify import deviation
from tritongemm.operations.linear_w4 import dequantize
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import served_w4
from tritongemm.workloads import sizes

pytestmark = pytest.mark.usefixtures("unloaded")
EXACT = (NUMBERS - 8) * SCALES.t().repeat_interleave(GROUP, 1)
X = torch.randn(3, K, generator=torch.Generator().manual_seed(3)).bfloat16()


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
    pass


class WQLinear_GEMM(_Layer):
    w_bit = 4


class CompressedLinear(_Layer):
    pass


for kind, home in (
    (TorchQuantLinear, "gptqmodel.nn_modules.qlinear.torch"),
    (MarlinQuantLinear, "gptqmodel.nn_modules.qlinear.marlin"),
    (WQLinear_GEMM, "awq.modules.linear.gemm"),
    (CompressedLinear, "compressed_tensors.linear.compressed_linear"),
):
    kind.__module__ = home


def rows(order: str = "plain", group: int = GROUP, m: int = 4, bias: str = "none", more: str = "") -> Any:
    plain = Problem(m, N, K, *matrices("bf16", "int4", "bf16", layout="TN", order=order), bias=bias)
    return record(registry.get(Family, "a16w4").problem(plain, f"weight_{group}{more}"))


def gptq(zeros: int = 0x77777777, bias: bool = False) -> TorchQuantLinear:
    index = torch.arange(K, dtype=torch.int32) // GROUP
    return TorchQuantLinear(bias, qweight=GPTQ, qzeros=filled(zeros, GROUPS, N // 8), scales=HALF.half(), g_idx=index)


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gptq, self.asymmetric = gptq(bias=True), gptq(0x77777771)
        self.second = gptq(EIGHTS)
        self.second.version = 2
        self.awq = WQLinear_GEMM(qweight=AWQ, qzeros=filled(EIGHTS, GROUPS, N // 8), scales=HALF)
        self.compressed = CompressedLinear(weight_packed=COMPRESSED, weight_scale=HALF.t())
        self.marlin = MarlinQuantLinear(qweight=GPTQ, scales=HALF)
        self.narrow = gptq()
        self.narrow.bits = 3
        self.other = CompressedLinear(weight_packed=COMPRESSED[:8], weight_scale=HALF.t()[:8])


def test_layers_with_a_row_are_converted_to_its_order_until_that_is_undone() -> None:
    model = Model()
    before = model.state_dict()
    patched = tritongemm.patch(model, [rows("halves_32"), rows("halves_32", m=8), rows(), rows(group=128)])
    assert patched.patched == ("gptq", "second", "awq", "compressed")
    assert patched.left == {
        "asymmetric": f"no row of int4 for N={N}, K={K} with groups of {GROUP} and zero points",
        "marlin": "of class gptqmodel.nn_modules.qlinear.marlin.MarlinQuantLinear",
        "narrow": "its bits is 3",
        "other": f"no row of int4 for N=8, K={K}",
    }
    assert str(patched).startswith("0 of 8 linear layers are served; 4 patched, but on no GPU, so that PyTorch")
    assert str(tritongemm.patch(model)).startswith("0 of 8 linear layers are served; 4 left: served already")
    assert model.state_dict().keys() == before.keys()
    for one in (model, copy.deepcopy(model)):
        for name in patched.patched:
            layer = getattr(one, name)
            assert layer.w4_order == "halves_32" and type(layer).__name__.startswith("Served")
            exact = X.double() @ EXACT.t() + (0 if layer.bias is None else layer.bias.double())
            assert deviation(layer(X), exact) < 1e-2
    with patched.paused(), pytest.raises(AssertionError, match="own product"):
        model.awq(X)
    with pytest.raises(AssertionError, match="own product"):
        model.awq(X.float())  # no row multiplies float32
    patched.undo()
    assert type(model.awq) is WQLinear_GEMM and not hasattr(model.awq, "w4_weight")


def test_layers_of_nvfp4_are_served_unless_their_activations_are_quantised_too() -> None:
    numbers = torch.randint(0, 256, (16, K // 2), dtype=torch.uint8)
    scale = torch.randint(1, 9, (16, K // 16)).to(torch.float8_e4m3fn)
    of = {"weight_packed": numbers, "weight_scale": scale, "weight_global_scale": torch.tensor([64.0])}
    model = nn.ModuleDict({name: CompressedLinear(**of) for name in ("served", "other", "broken")})
    model["other"].quantization_scheme = SimpleNamespace(input_activations="fp4")
    model["broken"].weight_scale = scale[:, 1:]
    plain = Problem(4, 16, K, *matrices("bf16", "fp4e2m1", "bf16", layout="TN", order="fragments"))
    patched = tritongemm.patch(model, [record(registry.get(Family, "a16w4").problem(plain, "weight_16"))])
    assert patched.patched == ("served",) and model["served"].w4_order == "fragments"
    assert patched.left["other"] == "its activations are quantised to fp4 too"
    assert "weight_scale (16, 15)" in patched.left["broken"]
    exact = X.double() @ dequantize(numbers, scale.bfloat16().t() / 64, "plain", torch.float64).t()
    assert deviation(model["served"](X), exact) < 1e-2


def test_a_row_with_zero_points_serves_layers_that_have_them() -> None:
    model = Model()
    patched = tritongemm.patch(model, [rows("halves_32", more="_zeros")])
    assert patched.patched == ("asymmetric",) and model.asymmetric.w4_scale.shape == (GROUPS, 2, N)
    zeros = torch.full((N, 1), 8)
    zeros[::8] = 2  # of the columns that the lowest bits of each int32 are for
    exact = X.double() @ ((NUMBERS - zeros) * SCALES.t().repeat_interleave(GROUP, 1)).t()
    assert deviation(model.asymmetric(X), exact) < 1e-2


def test_a_compiled_layer_is_one_operator() -> None:
    model, graphs = Model(), Graphs()
    tritongemm.patch(model, [rows()])
    compiled = torch.compile(model.awq, fullgraph=True, backend=graphs, dynamic=True)
    with torch.no_grad():
        assert torch.equal(compiled(X), model.awq(X)) and torch.equal(compiled(X[:2]), model.awq(X[:2]))
    assert graphs == [[torch.ops.tritongemm.linear_w4]]


def test_a_capture_writes_layers_that_have_no_row_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(served_w4, "_arch", lambda weight: "sm90")
    model.other = CompressedLinear(weight_packed=COMPRESSED[:16], weight_scale=HALF.t()[:16])
    with torch.no_grad(), tritongemm.capture(tmp_path / "sizes.yaml"):
        patched = tritongemm.patch(model, [])
        assert patched.patched == ("gptq", "asymmetric", "second", "awq", "compressed", "other")
        model.awq(X), model.compressed(X), model.gptq(X.half()), model.other(X)
    found = sizes.from_file(tmp_path / "sizes.yaml", Defaults())
    assert [(row.problem.key, row.count) for row in found] == [
        (f"3x{N}x{K}_bf16-int4-bf16_TN_a16w4_weight_64", 2),
        (f"3x{N}x{K}_fp16-int4-fp16_TN_biasn_a16w4_weight_64_fp16", 1),
        (f"3x16x{K}_bf16-int4-bf16_TN_a16w4_weight_64_fragments", 1),  # as N is a multiple of 16
    ]

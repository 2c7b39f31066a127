import copy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritongemm
from tests.cpu.operations import test_four_bit_weights as bits
from tests.cpu.operations.test_four_bit_weights import GROUP, K, N
from tests.support import patched_layers as layers
from tests.support.linear_layers import StandInKernel, problem, record, stand_in_kernels
from tests.support.nouns import Defaults, Groups, Operand, Patch, fails, refuses, sizes
from tests.support.patched_layers import EXPERTS, HIDDEN, INNER, KINDS, MXFP4, row_of_fp8, row_of_int4, rows_of_experts
from tests.support.products import product
from tests.support.served_region import Graphs, copies
from tritongemm.numerics.verify import deviation
from tritongemm.serving import served_w4
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.patch import ServedLinear

pytestmark = pytest.mark.usefixtures("unloaded")
COMPILED = ("linear", "fp8", "awq")  # the others are the same operations
# Weights of four bits are converted; their library's classes, or what holds their weights, are no importable ones.
CONVERTED = {*KINDS} - {"linear", "fp8", "experts", "experts of fp8"}


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_row_is_served_until_that_is_undone(kind: str) -> None:
    case = KINDS[kind]()
    model, own = nn.ModuleDict({"layer": case.layer, "other": nn.Linear(8, 8)}), type(case.layer)
    state, members = model.state_dict().keys(), {*vars(case.layer), *case.layer._buffers}
    with torch.no_grad():
        patched = tritongemm.patch(model, case.rows)
        assert patched.patched == ("layer",) and patched.left == {"other": "no row for N=8, K=8"}
        assert str(patched).startswith("0 of 2") and "1 patched, but on no GPU, so that PyTorch" in str(patched)
        second = tritongemm.patch(model)
        assert second.left["layer"] == "served already" and not second.patched
        second.undo()
        assert model.state_dict().keys() == state and type(model["layer"]) is not own
        found = model["layer"](*case.given)
        assert off(found, case.exact) < case.limit
        for again in (copy.deepcopy(model),) if kind in CONVERTED else copies(model):
            assert type(again["layer"]).__name__ == type(model["layer"]).__name__
            assert torch.equal(again["layer"](*case.given), found)
        if kind in COMPILED:
            graphs = Graphs()
            compiled = torch.compile(model["layer"], fullgraph=True, backend=graphs, dynamic=True)
            for given in (case.given[0], case.given[0][:2]):
                torch.testing.assert_close(compiled(given), model["layer"](given))
            assert len(graphs) == 1 and sum("tritongemm." in str(target) for target in graphs[0]) == 1
        with patched.paused():
            assert type(model["layer"]) is own
    for _ in range(2):
        patched.undo()
    assert type(model["layer"]) is own and {*vars(case.layer), *case.layer._buffers} - {"_is_torch_compile"} == members
    assert str(patched).startswith("0 of 2") and "1 left" in str(patched)


@pytest.mark.parametrize("kind", ["linear", "fp8", "experts"])
def test_a_gradient_is_the_librarys_own(kind: str, monkeypatch: Patch) -> None:
    case = KINDS[kind]()
    if kind == "fp8":
        weight = layers.dequantised(case.layer)
        monkeypatch.setattr(layers.fp8(), "fp8_linear", lambda x, *_: (x.double() @ weight.T).float())
    x, *others = case.given
    leaves = [x.requires_grad_(), *(p for p in case.layer.parameters() if p.requires_grad and p.dtype == x.dtype)]
    outs = [case.layer(x, *others)]
    tritongemm.patch(nn.ModuleList([case.layer]), case.rows)
    outs.append(case.layer(x, *others))
    first, second = (torch.autograd.grad(out.float().sum(), leaves, allow_unused=True) for out in outs)
    assert first[0] is not None and bool(first[0].any())
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(first, second, strict=True))


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_a_capture_sees_the_products_of_served_layers(tmp_path: Path) -> None:
    cases = [KINDS[kind]() for kind in ("fp8", "experts", "experts of fp8")]
    with tritongemm.capture(tmp_path / "sizes.yaml"):
        for case in cases:
            tritongemm.patch(nn.ModuleList([case.layer]), case.rows)
            case.layer(*case.given)
        mxfp4, _ = layers.mlp_of_mxfp4()
        assert tritongemm.patch(mxfp4, []).patched == ("experts",)  # which has no row yet
        mxfp4(MXFP4.x[None])
    captured = [row.problem for row in sizes.from_file(tmp_path / "sizes.yaml", Defaults())]
    plain = [replace(p, groups=p.groups and Groups(p.groups.count)) for p in captured]
    wanted = [row.problem.at(10) for row in (*rows_of_experts(), *rows_of_experts(True))]
    layer = replace(row_of_fp8(300, 256).problem, m=5, c=Operand("fp32"), bias="n")
    assert plain[:5] == [layer, *wanted] and all(sum(p.groups.counts) == p.m for p in captured[1:5] if p.groups)
    last = [(p.b.dtype, p.n, p.k) for p in plain[5:] if p.groups]
    assert last == [("fp4e2m1", 2 * MXFP4.inner, MXFP4.hidden), ("fp4e2m1", MXFP4.hidden, MXFP4.inner)]


# --- Linear layers ----------------------------------------------------------------------------------------------------


class Block(nn.Module):  # type: ignore[misc]
    """A feed-forward block with a tied weight, an adapter and a layer of a foreign class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.tied = nn.Linear(64, 96)
        self.tied.weight = self.up.weight
        self.adapter = LoraLinear(nn.Linear(64, 96))
        self.other = QuantisedLinear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.up(x)) * self.tied(x))
        return y


class LoraLinear(nn.Module):  # type: ignore[misc]
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer


class QuantisedLinear(nn.Linear):  # type: ignore[misc]
    pass


class Conv1D(nn.Module):  # type: ignore[misc]
    """Called as GPT-2's linear layer."""


ROWS = [record(problem(m, 96, 64, "n")) for m in (1, 16)]


def test_says_what_is_served_and_what_is_left() -> None:
    model = Block()
    patch = tritongemm.patch(model, ROWS)
    assert patch.patched == ("up", "tied", "adapter.base_layer")
    assert patch.left == {
        "down": "no row for N=64, K=96",
        "adapter": f"of class {__name__}.LoraLinear",
        "other": f"of class {__name__}.QuantisedLinear",
    }
    assert str(patch).startswith(
        "0 of 6 linear layers are served; 3 patched, but on no GPU, so that PyTorch computes them; "
        "1 left: no row for N=64, K=96; 1 left: of class"
    )
    assert set(tritongemm.patch(model).left.values()) >= {"served already"}
    (reason,) = tritongemm.patch(Conv1D()).left.values()
    assert reason == f"of class {__name__}.Conv1D, which tritongemm.serve serves by rows with a row-major B"
    patch.undo()
    patch.undo()
    assert str(patch).startswith("0 of 6 linear layers are served; 1 left")
    assert not any(isinstance(module, ServedLinear) for module in model.modules())


def test_only_layers_whose_rows_serve_the_gpu_are_called_served() -> None:
    """The stand-in for a GPU is where tensors of a CPU are."""
    turned = replace(ROWS[0].problem, n=64, k=96, bias="none", b=ROWS[0].problem.b._replace(row_major=True))
    tritongemm.load([*ROWS, record(turned), record(problem(1, 32, 32), target="gfx942")])
    dispatcher = default_dispatcher()
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records, {r.problem: StandInKernel() for r in ROWS})
    patch = tritongemm.patch(nn.ModuleList([nn.Linear(64, 96), nn.Linear(32, 32), nn.Linear(96, 64)]), join=False)
    assert str(patch) == (
        "1 of 3 linear layers are served; 1 patched, but with rows that are for gfx942; "
        "1 left: no row for N=64, K=96, but one with a row-major B or a column-major A (tune with -col_b)"
    )


def test_layers_that_others_changed_and_other_experts_are_left() -> None:
    class Packed(Tensor):  # type: ignore[misc]
        pass

    hooked, packed, wrapped = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(64, 96)
    hooked.forward = lambda input: input  # as accelerate does
    packed.weight = nn.Parameter(torch.empty(96, 64).as_subclass(Packed), requires_grad=False)
    nn.utils.parametrizations.weight_norm(wrapped)
    left = tritongemm.patch(nn.ModuleList([hooked, packed, wrapped]), ROWS).left
    fails(TypeError, r"model must be a torch.nn.Module, not float", tritongemm.patch, 1.0)
    assert left["0"] == "another library replaced its forward" and left["1"] == "its weight is a Packed"
    assert "ParametrizedLinear" in left["2"]
    static = layers.fp8_experts(layers.experts())
    static.activation_scheme = "static"
    replaced, biased = layers.experts(), layers.experts()
    replaced.forward = lambda *_: None
    biased.has_bias = True
    model = nn.ModuleList([layers.experts("relu"), static, replaced, biased, layers.experts()])
    left = tritongemm.patch(model, [*rows_of_experts()[:1], *rows_of_experts(True)]).left
    assert left["0"].startswith("its gate is none of silu") and left["1"].startswith("its factors are not dynamic")
    assert left["2"] == "another library replaced its forward" and left["3"] == "its experts have biases"
    assert left["4"] == "no row for 4 experts of N=128, K=128, bf16"


def test_nothing_but_the_computation_changes() -> None:
    model, x = Block().bfloat16(), torch.randn(5, 64).bfloat16()
    before, names = model.state_dict(), [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        expected = model(x)
        patch = tritongemm.patch(model, ROWS)
        assert torch.equal(model(x), expected) and model.state_dict().keys() == before.keys()
        assert [name for name, _ in model.named_parameters()] == names and model.up.weight is model.tied.weight
        copied, read = copies(model)
        for other in (copied, read):
            assert type(other.up) is ServedLinear and torch.equal(other(x), expected)
            assert other.up.weight is other.tied.weight
        copied.load_state_dict(before)
        patch.undo()
        assert type(model.up) is nn.Linear and type(copied.up) is ServedLinear
        assert model.to("meta").up.weight.is_meta


def test_one_graph_serves_every_m() -> None:
    model, graphs = Block(), Graphs("aot_eager")
    tritongemm.patch(model, ROWS)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for rows in (2, 3, 17, 300):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1 and graphs[0].count(torch.ops.tritongemm.mm) == 2


# --- Layers of fp8 ----------------------------------------------------------------------------------------------------


def test_fp8_layers_that_others_changed_are_left_and_broken_ones_refused() -> None:
    static, replaced, scalar = (layers.fp8_linear(256, 300, activation_scheme=s) for s in ("static", *["dynamic"] * 2))
    replaced.forward = lambda x: x
    scalar.weight_scale_inv = nn.Parameter(torch.ones(()))
    model = nn.ModuleList([static, replaced, scalar, layers.fp8_linear(128, 256), nn.Linear(256, 300)])
    left = tritongemm.patch(model, [row_of_fp8(256, 300)]).left
    assert [left[name] for name in "0134"] == [
        "its activations have a static factor", "another library replaced its forward",
        "no row with scales for N=128, K=256", "no row for N=300, K=256",
    ]  # fmt: skip
    assert left["2"].startswith("its factors are torch.float32 ()")
    model = nn.ModuleList([layers.fp8_linear(256, 300) for _ in range(2)])
    model[1].weight_scale_inv.data[0, 0] = float("nan")
    refuses("NaN or infinite: load its weights", tritongemm.patch, model, [row_of_fp8(256, 300)])
    assert type(model[0]) is layers.fp8().FP8Linear


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_calls_that_our_kernels_do_not_take_are_transformers() -> None:
    """Weights may be dequantised after `patch`, and a step may have no tokens."""
    case = KINDS["fp8"]()
    tritongemm.patch(nn.ModuleList([case.layer]), case.rows)
    assert case.layer(torch.ones(2, 0, 256)).shape == (2, 0, 300)
    entire, x = case.layer.bfloat16(), torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(entire(x), functional.linear(x, entire.weight, entire.bias))


# --- Experts ----------------------------------------------------------------------------------------------------------


def test_experts_whose_weights_are_stored_otherwise_are_left() -> None:
    """Llama 4's are stored with K first, and take no ids; LongCat-Flash's gate has experts that return tokens."""
    llama = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    longcat = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    of_llama = SimpleNamespace(
        num_local_experts=EXPERTS, intermediate_size=INNER, hidden_size=HIDDEN, hidden_act="silu"
    )
    of_longcat = SimpleNamespace(
        n_routed_experts=EXPERTS, zero_expert_num=2, expert_ffn_hidden_size=INNER, hidden_size=HIDDEN, hidden_act="silu"
    )
    model = nn.ModuleList([llama.Llama4TextExperts(of_llama), longcat.LongcatFlashExperts(of_longcat)]).bfloat16()
    weights = [getattr(layer, name) for layer in model for name in ("gate_up_proj", "down_proj")]
    known = [record(product("dense", 8, w.shape[1], w.shape[2], "bf16", groups=Groups(w.shape[0]))) for w in weights]
    left = tritongemm.patch(model, known).left
    assert left["0"].startswith("its weights are (4, 128, 256) and (4, 128, 128), not [experts, 2 * inner, hidden]")
    assert left["1"].startswith("its weights are (6, 256, 128) and (4, 128, 128)")


def test_experts_of_mxfp4_that_are_not_served_are_named() -> None:
    layer, _ = layers.mlp_of_mxfp4()
    w1, w2 = layers.rows_of_mxfp4("plain")[0], layers.rows_of_mxfp4("halves_32")[1]
    assert tritongemm.patch(layer, [w1, w2]).left == {
        "experts": f"no rows of one order for {EXPERTS} experts of mxfp4 of N={2 * MXFP4.inner}, K={MXFP4.hidden} and "
        f"N={MXFP4.hidden}, K={MXFP4.inner}"
    }
    layer.experts.limit = 5.0
    assert tritongemm.patch(layer, layers.rows_of_mxfp4()).left == {"experts": "its limit is 5.0"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(type(layer.experts), "forward", lambda self, hidden_states, routing_data: None)
        layer.experts.limit = 7.0
        (why,) = tritongemm.patch(layer, layers.rows_of_mxfp4()).left.values()
        assert why.startswith("its forward takes hidden_states, routing_data; of transformers 5.24 on")
    layer.experts.limit, layer.experts.down_proj = 7.0, nn.Parameter(torch.zeros(1))
    (why,) = tritongemm.patch(layer, layers.rows_of_mxfp4()).left.values()
    assert why.startswith("its weights are not as OpenAI's triton_kernels keeps them: ")


# --- Layers of four bits ----------------------------------------------------------------------------------------------


def test_layers_of_four_bits_without_a_row_or_of_other_kinds_are_left() -> None:
    narrow = layers.gptq()
    narrow.bits = 3
    quantised, broken = layers.of_nvfp4().layer, layers.of_nvfp4().layer
    quantised.quantization_scheme = SimpleNamespace(input_activations="fp4")
    broken.weight_scale = broken.weight_scale[:, 1:]
    unsaid, sorted_ = layers.gptq(), layers.CompressedLinear(weight_packed=bits.COMPRESSED, weight_scale=bits.HALF.t())
    unsaid.desc_act, unsaid.g_idx = True, None
    sorted_.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(actorder="group"), input_activations=None)
    decompressed, of_fp8 = layers.compressed_linear(), layers.compressed_linear()
    for layer, dtype in ((decompressed, torch.bfloat16), (of_fp8, torch.float8_e4m3fn)):
        layer.weight = nn.Parameter(layer._parameters.pop("weight_packed").to(dtype), requires_grad=False)
    model = nn.ModuleDict({
        "unsaid": unsaid, "sorted": sorted_, "decompressed": decompressed, "of fp8": of_fp8,
        "eight": layers.compressed_linear(weights=SimpleNamespace(num_bits=8)),
        "asymmetric": layers.gptq(0x77777771), "narrow": narrow,
        "marlin": layers.marlin(desc_act=True), "unlike marlin": layers.marlin(in_features=2 * K),
        "other": layers.CompressedLinear(weight_packed=bits.COMPRESSED[:8], weight_scale=bits.HALF.t()[:8]),
        "quantised": quantised, "broken": broken, "served": layers.gptq(),
    })  # fmt: skip
    rows = [row_of_int4("halves_32"), row_of_int4("halves_32", m=8), row_of_int4(), row_of_int4(group=128)]
    rows += layers.of_nvfp4().rows
    left = tritongemm.patch(model, rows).left
    assert "weight_scale (16, 15)" in left.pop("broken") and left == {
        "asymmetric": f"no row of int4 for N={N}, K={K} with groups of {GROUP} and zero points",
        "marlin": "its K is sorted (desc_act)",
        "unlike marlin": "its weight is not in Marlin's order yet",
        "narrow": "its bits is 3",
        "other": f"no row of int4 for N=8, K={K}",
        "quantised": "its activations are quantised too",
        "decompressed": "compressed-tensors decompressed it at a call: patch the model before its first",
        "of fp8": "compressed-tensors has it in torch.float8_e4m3fn",
        "eight": "its weight has 8 bits",
        "unsaid": "its K is sorted (desc_act), and no g_idx says how",
        "sorted": "its K is sorted (actorder), and no weight_g_idx says how",
    }
    assert model["served"].w4_order == "halves_32"
    with pytest.raises(AssertionError, match="own product"):
        model["served"](layers.X.float())  # no row multiplies float32


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_compressed_tensors_decompresses_a_layer_when_it_is_called_again(monkeypatch: Patch) -> None:
    def decompress(layer: Any) -> None:
        packed = layer._parameters.pop("weight_packed")
        layer.weight = nn.Parameter(case.exact.new_ones(packed.shape[0], K).bfloat16(), requires_grad=False)

    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", SimpleNamespace(decompress_module=decompress))
    case, sums = KINDS["compressed-tensors"](), layers.X.sum(1, True).expand(-1, N).double()
    patched = tritongemm.patch(nn.ModuleList([case.layer]), case.rows)
    assert not hasattr(case.layer, "quantization_scheme")  # by which it finds the layers that it decompresses
    with torch.autocast("cpu", torch.bfloat16):
        assert off(case.layer(layers.X.float()), case.exact) < 0.02
    with patched.paused():
        assert off(case.layer(layers.X), sums) < 0.02 and case.layer.weight.shape == (N, K)
    assert off(case.layer(layers.X), case.exact) < 0.02
    patched.undo()
    assert off(case.layer(layers.X), sums) < 0.02 and not case.layer._forward_pre_hooks


def test_rows_say_the_order_of_a_weight_and_whether_it_has_zero_points() -> None:
    cases = [KINDS[kind]() for kind in ("gptq", "nvfp4", "experts of mxfp4 in halves")]
    for case, order in zip(cases, ("halves_32", "fragments", "halves_32"), strict=True):
        tritongemm.patch(nn.ModuleList([case.layer]), case.rows)
        assert case.layer.w4_order == order
    layer = layers.gptq(0x77777771)
    assert tritongemm.patch(nn.ModuleList([layer]), [row_of_int4("halves_32", more="_zeros")]).patched == ("0",)
    zeros = torch.full((N, 1), 8)
    zeros[::8] = 2  # of the columns that the lowest bits of each int32 are for
    weight = (bits.NUMBERS - zeros) * bits.HALF.double().t().repeat_interleave(GROUP, 1)
    assert layer.w4_scale.shape == (K // GROUP, 2, N)
    assert deviation(layer(layers.X), layers.X.double() @ weight.t()) < 1e-2


def test_a_capture_writes_layers_of_int4_that_have_no_row_yet(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(served_w4, "_arch", lambda weight: "sm90")
    x, model = layers.X, nn.ModuleDict({kind: KINDS[kind]().layer for kind in ("awq", "compressed-tensors", "gptq")})
    model["other"] = layers.CompressedLinear(weight_packed=bits.COMPRESSED[:16], weight_scale=bits.HALF.t()[:16])
    with torch.no_grad(), tritongemm.capture(tmp_path / "sizes.yaml"):
        assert tritongemm.patch(model, []).patched == tuple(model)
        model["awq"](x), model["compressed-tensors"](x), model["gptq"](x.half()), model["other"](x)
    assert [(row.problem.key, row.count) for row in sizes.from_file(tmp_path / "sizes.yaml", Defaults())] == [
        (f"3x{N}x{K}_bf16-int4-bf16_TN_a16w4_weight_64", 2),
        (f"3x{N}x{K}_fp16-int4-fp16_TN_biasn_a16w4_weight_64_fp16", 1),
        (f"3x16x{K}_bf16-int4-bf16_TN_a16w4_weight_64_fragments", 1),  # as N is a multiple of 16
    ]

"""Layers of transformers that compute more than a product in one kernel: when, what falls back, how it is undone."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import StandInKernel, problem, record, stand_in_kernels
from tests.support.nouns import Problem, apart
from tests.support.served_region import copies
from tritongemm.numerics import epilogues
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.fused_layers import WaitingProduct
from tritongemm.serving.patch import Patch

K, INNER = 64, 96
ROWS = {16: "triton", 64: "torch"}  # the winner at each M


class Calls(list[int]):
    def __call__(self, x: Tensor, w: Tensor, act: str, bias: Tensor | None = None) -> Tensor:
        self.append(x.numel() // K)
        return epilogues.apply(act, nn.functional.linear(x, w, bias))


@pytest.fixture
def calls(unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr("tritongemm.serving.fused_layers.linear_act", made)
    with torch.no_grad():
        yield made


def mlp(model: str = "Llama") -> Any:
    """The MLP's class, imported late: transformers takes two seconds, in every process that collects tests."""
    return getattr(
        importlib.import_module(f"transformers.models.{model.lower()}.modeling_{model.lower()}"), f"{model}MLP"
    )


def make(model: str = "Llama", kind: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(importlib.import_module("transformers"), f"{model}Config")
    return (kind or mlp(model))(config(hidden_size=K, intermediate_size=INNER, **more)).bfloat16()


def patch(model: nn.Module, act: str = "silu_mul", bias: str = "none") -> Patch:
    of: dict[int, Problem] = {m: problem(m, 2 * INNER, K, bias) for m in ROWS}
    rows = {m: Problem(p.m, p.n, p.k, p.a, p.b, p.c, bias, epilogue=act) for m, p in of.items()}
    tritongemm.load([record(p, m_from=1 + m // 4, winner=ROWS[m]) for m, p in rows.items()])
    dispatcher = default_dispatcher()
    kernels = stand_in_kernels(dispatcher._records)
    kernels.loaded_ranges = {rows[16]: StandInKernel()}
    kernels.binders = {(rows[16], 5): lambda m: StandInKernel()}
    dispatcher._devices[-1] = kernels
    return tritongemm.patch(model)


@apart(
    ("Llama", "silu_mul", {}),
    ("Llama", "gelu_tanh_mul", {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}),
    ("Qwen3", "silu_mul", {}),
)
def test_a_kernel_computes_gate_and_up_where_it_won(name: str, act: str, more: dict[str, Any], /, calls: Calls) -> None:
    kind, model = mlp(name), nn.Sequential(make(name, **more))
    xs = [torch.randn(m, K).bfloat16() for m in (16, 5, 4, 64)]
    wanted, state = [model(x) for x in xs], set(model.state_dict())
    patched = patch(model, act, "n" if more.get("mlp_bias") else "none")
    assert patched.gated == ("0",) and "1 of gate and up fused with their activation" in str(patched)
    for x, theirs in zip(xs, wanted, strict=True):
        torch.testing.assert_close(model(x), theirs, rtol=0.02, atol=0.02)
    assert calls == [16, 5]  # the others have no row, and one that the two steps won
    assert set(model.state_dict()) == state and isinstance(model[0], kind)
    with patched.paused():
        model(xs[0])
    for other in copies(model):
        torch.testing.assert_close(other(xs[0]), wanted[0])
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(xs[0]), wanted[0])
    patched.undo()
    assert type(model[0]) is kind and torch.equal(model(xs[0]), wanted[0]) and calls == [16, 5]


def test_other_weights_gradients_and_other_modules_are_computed_in_two_steps(calls: Calls) -> None:
    LlamaMLP = mlp()

    class Halved(LlamaMLP):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)

    model = nn.ModuleDict({"mlp": make(), "halved": make(kind=Halved), "other": make(hidden_act="relu")})
    x = torch.randn(16, K).bfloat16()
    assert patch(model).gated == ("mlp",)
    with torch.enable_grad():
        model["mlp"](x).sum().backward()
    assert not calls and model["mlp"].gate_proj.weight.grad is not None
    model["mlp"](x)
    model["mlp"].up_proj.weight.mul_(2)
    assert calls == [16] and torch.equal(model["mlp"](x), LlamaMLP.forward(model["mlp"], x))


def decoder(kind: Any = None) -> Any:
    """A decoder layer of Llama, or of a class made of it, of 64 channels."""
    torch.manual_seed(0)
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    config = module.LlamaConfig(hidden_size=K, intermediate_size=INNER, num_attention_heads=2, head_dim=32)
    config._attn_implementation = "eager"
    made = module.LlamaDecoderLayer if kind is None else kind(module.LlamaDecoderLayer)
    return made(config, 0).bfloat16()


def call(layer: nn.Module, x: Tensor) -> Tensor:
    one = torch.ones(1, x.shape[1], 32).bfloat16()
    result: Tensor = layer(x, position_embeddings=(one, torch.zeros_like(one)))
    return result


def patch_sums(model: nn.Module) -> Patch:
    """Patch with rows of both projections' M 16 that add a residual, and of plain products, all with stand-ins."""
    plain = [problem(16, n, k) for n, k in ((K, K), (K, INNER), (INNER, K))]
    sums = [Problem(p.m, p.n, p.k, p.a, p.b, p.c, epilogue="add") for p in plain[:2]]
    tritongemm.load([record(p) for p in (*plain, *sums)])
    dispatcher = default_dispatcher()
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records, dict.fromkeys(sums, StandInKernel()))
    return tritongemm.patch(model)


def test_projections_add_the_residual_of_a_decoder_layer_where_a_row_says_so(
    monkeypatch: pytest.MonkeyPatch, unloaded: Dispatcher
) -> None:
    added: list[int] = []

    def linear_add(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        added.append(w.shape[1])
        return nn.functional.linear(x, w) + residual

    monkeypatch.setattr("tritongemm.serving.fused_layers.linear_add", linear_add)
    model = nn.ModuleList([decoder()])
    xs = [torch.randn(1, m, K).bfloat16() for m in (16, 5)]
    with torch.no_grad():
        wanted = [call(model[0], x) for x in xs]
        patched = patch_sums(model)
        assert patched.summed == ("0",) and "1 decoder layers add residuals in their products" in str(patched)
        for x, theirs in zip(xs, wanted, strict=True):
            torch.testing.assert_close(call(model[0], x), theirs, rtol=0.02, atol=0.02)
        assert added == [K, INNER]  # at M 16 alone
        for other in copies(model):
            torch.testing.assert_close(call(other[0], xs[0]), wanted[0])
        seen: list[Any] = []
        hook: Any = lambda module, given, result: seen.append(result)
        for place, adds in (("here", False), ("transformers.utils.output_capturing", True)):
            hook.__module__ = place
            handle = model[0].mlp.register_forward_hook(hook)
            call(model[0], xs[0])
            handle.remove()
            assert len(seen) == 1 and (type(seen.pop()) is not Tensor) == adds and len(added) == 2 + 2 * adds
        del added[2:]
        assert type(model[0].mlp(xs[0])) is Tensor and len(added) == 2
    assert call(model[0], xs[0]).requires_grad and len(added) == 2
    patched.undo()
    assert type(model[0]).__name__ == "LlamaDecoderLayer" and "_sums" not in vars(model[0])
    with torch.no_grad():
        assert torch.equal(call(model[0], xs[0]), wanted[0])


def test_decoder_layers_that_compute_something_else_are_left(unloaded: Dispatcher) -> None:
    def scaled(base: Any) -> Any:
        class Scaled(base):  # type: ignore[misc]
            def forward(self, x: Tensor, **named: Any) -> Tensor:
                return x + self.self_attn(hidden_states=self.input_layernorm(x), **named)[0] * 0.5

        return Scaled

    assert not patch_sums(nn.ModuleList([decoder(scaled)])).summed


def test_a_product_that_waits_is_as_good_as_its_tensor() -> None:
    x, w, residual = (torch.randn(*shape) for shape in ((4, K), (32, K), (4, 32)))
    product, tensor = WaitingProduct(x, w), nn.functional.linear(x, w)
    others: list[Any] = [lambda one: one * 2, lambda one: 2 * one, lambda one: one.view(2, 2, 32), lambda one: one[1:]]
    for other in others:
        assert torch.equal(other(product), other(tensor))
    assert torch.equal(torch.relu(product), torch.relu(tensor)) and product.shape == (4, 32) and len(product) == 4
    assert torch.equal(torch.cat([product, residual]), torch.cat([tensor, residual]))
    for waits in (product, WaitingProduct(x, w)):
        for total in (residual + waits, waits + residual, torch.add(residual, waits), residual.add(waits, alpha=1)):
            torch.testing.assert_close(total, residual + tensor)
    assert torch.equal(residual[:1] + WaitingProduct(x, w), residual[:1] + tensor)

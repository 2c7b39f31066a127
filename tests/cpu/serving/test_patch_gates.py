"""MLPs of transformers whose gate, up and activation are one kernel: when, what falls back, and how it is undone."""

import copy
import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import StandInKernel, problem, record, stand_in_kernels
from tritongemm.core.problem import Problem
from tritongemm.numerics import epilogues
from tritongemm.serving.dispatcher import Dispatcher, default_dispatcher
from tritongemm.serving.patch import Patch

K, INNER = 64, 96
ROWS = {16: "triton", 64: "torch"}  # the winner at each M


class Calls(list[int]):
    """The rows of each call of `linear_act`."""

    def __call__(self, x: Tensor, w: Tensor, act: str, bias: Tensor | None = None) -> Tensor:
        self.append(x.numel() // K)
        return epilogues.apply(act, nn.functional.linear(x, w, bias))


@pytest.fixture
def calls(unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr("tritongemm.serving.joined_layers.linear_act", made)
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


@pytest.mark.parametrize(
    ("name", "act", "more"),
    [
        ("Llama", "silu_mul", {}),
        ("Llama", "gelu_tanh_mul", {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}),
        ("Qwen3", "silu_mul", {}),
    ],
)
def test_one_kernel_computes_gate_and_up_where_it_won(calls: Calls, name: str, act: str, more: dict[str, Any]) -> None:
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
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
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
    two_steps = model["mlp"](x)
    assert calls == [16] and torch.equal(two_steps, LlamaMLP.forward(model["mlp"], x))

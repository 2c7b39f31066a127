"""`patch` on transformers' fine-grained fp8 layers: its own class, with random weights, on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import record
from tests.support.served_region import copies
from tritongemm.core.errors import InputError
from tritongemm.core.problem import Problem, matrices
from tritongemm.numerics import verify
from tritongemm.operations.factors import find_scalings, spread
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.serving import served_layers

pytestmark = pytest.mark.usefixtures("unloaded")


def fp8() -> Any:
    """The module of its fp8 classes: its import takes seconds, and only who runs these tests needs it."""
    return pytest.importorskip("transformers.integrations.finegrained_fp8")


def problem(n: int, k: int) -> Problem:
    family = registry.get(Family, "a8w8_blockscale")
    return family.problem(Problem(16, n, k, *matrices("fp8e4m3fn", c="bf16", layout="TN")))


def layer(n: int, k: int, bias: bool = False, **options: object) -> nn.Module:
    made: nn.Module = fp8().FP8Linear(k, n, block_size=(128, 128), has_bias=bias, **options)
    with torch.no_grad():
        made.weight.copy_(torch.randn(n, k))
        made.weight_scale_inv.copy_(torch.rand(-(-n // 128), -(-k // 128)) * 0.05 + 0.01)
        if bias:
            made.bias.copy_(torch.randn(n))
    return made


def exact(of: nn.Module, x: Tensor) -> Tensor:
    n, k = of.weight.shape
    scale = of.weight_scale_inv.detach()
    scaling = next(found for found in find_scalings(scale, n, k) if found.depth)
    result = x.double() @ (of.weight.detach().double() * spread(scale, scaling, n, k)).T
    return result if of.bias is None else result + of.bias


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layer(300, 256, bias=True), layer(256, 300)
        self.other = layer(128, 256)
        self.static = layer(256, 300, activation_scheme="static")
        self.plain = nn.Linear(256, 300)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


def test_layers_with_a_row_are_served_until_that_is_undone() -> None:
    model = Model()
    before = model.state_dict()
    patched = tritongemm.patch(model, [record(problem(300, 256)), record(problem(256, 300))])
    assert patched.patched == ("up", "down")
    assert patched.left == {
        "other": "no row with scales for N=128, K=256",
        "static": "its activations have a static factor",
        "plain": "no row for N=300, K=256",
    }
    assert str(tritongemm.patch(model)).startswith("0 of 5 linear layers are served; 2 left: served already")
    assert model.state_dict().keys() == before.keys()
    x = torch.randn(2, 5, 256)
    with torch.no_grad():
        served = model.up(x)
        assert verify.deviation(served.view(10, -1), exact(model.up, x.view(10, -1))) < 0.2
        for other in copies(model):
            assert isinstance(other.up, served_layers.ServedFP8Linear) and torch.equal(other(x), model(x))
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
        for rows in (5, 3):
            assert torch.equal(compiled(x[:, :rows]), model(x[:, :rows]))
    patched.undo()
    assert type(model.up) is fp8().FP8Linear and type(model.down) is fp8().FP8Linear
    patched.undo()


def test_a_gradient_is_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    tritongemm.patch(model, [record(problem(300, 256))])
    monkeypatch.setattr(fp8(), "fp8_linear", lambda x, w, scale, *_: exact(model.up, x).float())
    x = torch.randn(3, 256, requires_grad=True)
    model.up(x).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_factors_that_were_never_loaded_are_refused() -> None:
    model = Model()
    with torch.no_grad():
        model.down.weight_scale_inv[0, 0] = float("nan")
    with pytest.raises(InputError, match="NaN or infinite: load its weights"):
        tritongemm.patch(model, [record(problem(300, 256)), record(problem(256, 300))])
    assert type(model.up) is fp8().FP8Linear


def test_a_replaced_forward_and_other_factors_are_left() -> None:
    model = Model()
    model.up.forward = lambda x: x
    model.other.weight_scale_inv = nn.Parameter(torch.ones(()))
    rows = [record(problem(300, 256)), record(problem(128, 256))]
    left = tritongemm.patch(model, rows).left
    assert left["up"] == "another library replaced its forward"
    assert left["other"].startswith("its factors are torch.float32 ()")


def test_calls_that_our_kernels_do_not_take_are_transformers() -> None:
    """Weights may be dequantised after `patch`, and a step may have no tokens."""
    model = Model()
    tritongemm.patch(model, [record(problem(300, 256))])
    with torch.no_grad():
        assert model.up(torch.ones(2, 0, 256)).shape == (2, 0, 300)
        entire = model.bfloat16()
        x = torch.randn(3, 256, dtype=torch.bfloat16)
        assert torch.equal(entire.up(x), nn.functional.linear(x, entire.up.weight, entire.up.bias))

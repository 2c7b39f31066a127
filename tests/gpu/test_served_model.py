import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritongemm
from tests.gpu.here import graph_of, needs_gpu, normal, record
from tests.support.fakes.servers import install_sglang, install_vllm, layer_of
from tests.support.nouns import Config, Dispatcher, Patch, Problem, matrices, results_format, verify
from tritongemm.integrations import sglang, vllm

pytestmark = [needs_gpu, pytest.mark.usefixtures("dispatcher")]
M, N, K = 16, 256, 512
TILE = Config("tile", 16, 64, 64, 1, 1, 4, 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A kernel of a known tile for M=16, with a bias and without."""
    file = tmp_path / "tuned.yaml"
    problems = [Problem(M, N, K, *matrices("bf16", layout="TN"), bias=bias) for bias in ("none", "n")]
    file.write_text(results_format().write([record(p, TILE) for p in problems]), encoding="utf-8")
    return file


def assert_close(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    exact = functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert verify.deviation(out, exact) < 0.02


def test_a_patched_model(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)).cuda().bfloat16()
    inputs = [normal(m, K) for m in (1, M, 17, 300)]
    expected = [model[0](x) for x in inputs]
    with caplog.at_level(logging.INFO, "tritongemm"):
        patch = tritongemm.patch(model, table)
    assert patch.patched == ("0",) and "2 of 2 rows serve cuda:0" in caplog.text
    assert tritongemm.explain(inputs[1], model[0].weight, model[0].bias).startswith("exact")
    for x, theirs in zip(inputs, expected, strict=True):
        ours = model[0](x)
        assert_close(ours, x, model[0].weight, model[0].bias)
        assert x.shape[0] == M or torch.equal(ours, theirs)
    patch.undo()
    assert torch.equal(model[0](inputs[1]), expected[1])


@pytest.mark.parametrize("layout", ["TT", "TN"])
def test_a_region_serves_products_of_matrices(layout: str) -> None:
    x, b, bias = normal(M, K), normal(K, N) if layout == "TT" else normal(N, K).t(), normal(N)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.mm(x, b),
        lambda x: torch.matmul(x, b),
        lambda x: x @ b,
        lambda x: x.unflatten(0, (-1, 4)) @ b,
        lambda x: torch.addmm(bias, x, b),
        lambda x: functional.linear(x, b.t()),
        lambda x: functional.linear(x, b.t(), bias),
    ]
    beyond = normal(80, K)
    theirs = [call(beyond) for call in calls]
    of = [Problem(M, N, K, *matrices("bf16", layout=layout), bias=one) for one in ("none", "n")]
    with tritongemm.serve([record(p, TILE) for p in of]):
        served = [call(x) for call in calls]
        assert all(torch.equal(call(beyond), expected) for call, expected in zip(calls, theirs, strict=True))
        graph, captured = graph_of(calls[2], x)
        apart, beside = (normal(t.numel() + 1)[1:].as_strided(t.size(), t.stride()).copy_(t) for t in (x, b))
        for one, other in ((apart, b), (x, beside)):  # addresses that kernels don't take
            assert_close(one @ other, x, b.t())
        other = b.contiguous() if layout == "TN" else b.t().contiguous().t()
        assert_close(x @ other, x, b.t())  # the other order, which has no row
        trained = b.clone().requires_grad_()
        with torch.enable_grad():
            (x @ trained).sum().backward()
        assert trained.grad is not None
    for with_bias, out in zip((False,) * 4 + (True, False, True), served, strict=True):
        assert torch.equal(out.view(M, N), tritongemm.mm(x, b.t(), bias if with_bias else None))
        assert_close(out.view(M, N), x, b.t(), bias if with_bias else None)
    x.copy_(normal(M, K))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(captured, x, b.t())


class Attention(nn.Module):  # type: ignore[misc]
    """Three layers of one input, by which a model of transformers splits heads and multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(K, 2 * N), nn.Linear(K, N), nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:-1], -1, 64) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return functional.silu(q[..., :4, :]) * k + v.sin()


def test_joined_layers(monkeypatch: Patch) -> None:
    problems = [Problem(M, n, K, *matrices("bf16", layout="TN"), bias="n") for n in (N, 2 * N, 4 * N)]
    joined_table = [record(p, TILE, seconds=1e-5) for p in problems]  # the parts take as long as their joined product
    torch.manual_seed(0)
    model = Attention().cuda().bfloat16()
    xs = [normal(M, K), normal(1, M, K), normal(17, K)]
    apart = tritongemm.patch(model, joined_table, join=False)
    expected = [model(x) for x in xs]
    apart.undo()
    patch = tritongemm.patch(model)
    assert patch.joined == (("q_proj", "k_proj", "v_proj"),)
    widths: list[int] = []

    def keep(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        widths.append(w.shape[0])
        return tritongemm.mm(x, w, bias)

    monkeypatch.setattr("tritongemm.serving.joined_layers.mm", keep)
    for _ in range(2):
        for x, wanted in zip(xs, expected, strict=True):
            torch.testing.assert_close(model(x), wanted, rtol=0.02, atol=0.02)
    assert widths == [4 * N] * 3, "not the first call, and not M=17, which has no row"
    entire = patch._groups[patch.joined[0]]
    assert tritongemm.explain(xs[0], entire.weight, entire.bias).startswith("exact")
    q = model.q_proj(xs[0])
    xs[0].mul_(2)
    assert_close(model.k_proj(xs[0]), xs[0], model.k_proj.weight, model.k_proj.bias)
    assert_close(q * 2 - model.q_proj.bias, xs[0], model.q_proj.weight, model.q_proj.bias)
    other = normal(M, K)
    model.q_proj(other)
    assert_close(model.v_proj(xs[0]), xs[0], model.v_proj.weight, model.v_proj.bias)
    for _ in range(3):
        model(other)
    widths.clear()
    graph, captured = graph_of(model, other)
    assert widths == [4 * N]
    with patch.paused():
        theirs, plain = graph_of(model, other)
    other.copy_(normal(M, K))
    graph.replay()
    theirs.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, plain, rtol=0.02, atol=0.02)
    patch.undo()
    torch.testing.assert_close(model(other), plain, rtol=0.0, atol=0.0)
    assert model.k_proj.weight.untyped_storage().nbytes() == N * K * 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_patched_model_compiled(table: Path, mode: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(K, N), nn.SiLU()).cuda().bfloat16()
    tritongemm.patch(model, table)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, mode=mode)
    for m in (2, M, 17, 300, M):
        x = normal(m, K)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_servers_plug_in(table: Path, server: str, monkeypatch: Patch, dispatcher: Dispatcher) -> None:
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(table))
    if server == "vllm":
        _, utils = install_vllm(monkeypatch)
        vllm.register()
        gemm: Callable[..., Tensor] = utils.default_unquantized_gemm
    else:
        registry, server_classes, _ = install_sglang(monkeypatch)
        sglang.register()
        registry.apply_hooks()
        method = server_classes.UnquantizedLinearMethod()
        gemm = lambda layer, x, w, bias=None: method.apply(layer, x, bias)
    assert dispatcher.weights == {(N, K)} and not dispatcher._devices, "no GPU is started before a call"
    w, bias = normal(N, K), normal(N)
    layer = layer_of(w)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: gemm(layer, x, w, bias), dynamic=True, fullgraph=True)
    for m in (M, 2, 17, 300):
        x = normal(m, K)
        plain = functional.linear(x, w, bias)
        for out in (gemm(layer, x, w, bias), compiled(x)):
            assert_close(out, x, w, bias)
            assert m == M or torch.equal(out, plain)
    assert "exact" in str(dispatcher.explain(normal(M, K), w, bias))

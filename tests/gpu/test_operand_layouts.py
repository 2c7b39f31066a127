"""Rows whose A or B are stored otherwise than a linear layer's, served on a real GPU and compared with float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.gpu.here import TMA, graph_of, needs_gpu, normal, record
from tests.support.nouns import Config, Problem, Record, matrices
from tritongemm.numerics import verify
from tritongemm.serving.dispatcher import Dispatcher

pytestmark = [needs_gpu, pytest.mark.usefixtures("dispatcher")]
M, N, K = 16, 264, 512
CONFIGS = {"tile": Config("tile", 16, 64, 64, 1, 1, 4, 3), "split": Config("tile", 16, 64, 64, 1, 2, 4, 3)}
CONFIGS |= {"tma": Config("tma", 64, 64, 64, 1, 1, 4, 3)} if TMA else {}


def rows(config: Config, *layouts: str) -> list[Record]:
    """Rows at M with a bias and without, and a range beyond it, of each layout."""
    made = []
    for layout in layouts:
        for bias in ("none", "n"):
            of = Problem(M, N, K, *matrices("bf16", layout="NT"[layout[0] == "T"] + "NT"[layout[1] == "T"]), bias=bias)
            own = record(of, config)
            made += [own, replace(own, problem=of.at(64), m_from=M + 1)]
    return made


def assert_close(out: Tensor, x: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    exact = x.double() @ b.double() + (0 if bias is None else bias.double())
    assert out.shape == exact.shape and out.is_contiguous() and verify.deviation(out, exact) < 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_mm_serves_each_layout_by_its_own_row(name: str) -> None:
    tritongemm.load(rows(CONFIGS[name], "TT", "TN", "NT", "NN"))
    for _ in range(2):
        for m, kind in ((M, "exact"), (40, "range"), (65, "fallback")):
            x, b, bias = normal(m, K), normal(K, N), normal(N)
            for given in (x, x.t().contiguous().t()):
                for w in (b.t(), b.t().contiguous()):
                    layout = f"{'TN'[not given.is_contiguous()]}{'TN'[w.is_contiguous()]}"
                    said = tritongemm.explain(given, w)
                    # The kernel of a range knows what divides M if A is column-major, so that it serves no other M.
                    beyond_own = m == 40 and not given.is_contiguous()
                    assert said.startswith("fallback" if beyond_own else kind)
                    assert m != 65 or f"65x{N}x{K}_bf16_{layout}" in said
                    assert_close(tritongemm.mm(given, w), x, b)
                    assert_close(tritongemm.mm(given, w, bias), x, b, bias)
    x = normal(4, 4, K)
    assert tritongemm.explain(x, b.t()).startswith("exact")
    assert_close(tritongemm.mm(x, b.t()), x, b)


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
    with tritongemm.serve(rows(CONFIGS["tile"], layout)):
        served = [call(x) for call in calls]
        assert all(torch.equal(call(beyond), expected) for call, expected in zip(calls, theirs, strict=True))
        graph, captured = graph_of(calls[2], x)
        apart, beside = (normal(t.numel() + 1)[1:].as_strided(t.size(), t.stride()).copy_(t) for t in (x, b))
        for one, other in ((apart, b), (x, beside)):  # addresses that kernels don't take
            assert_close(one @ other, x, b)
        other = b.contiguous() if layout == "TN" else b.t().contiguous().t()
        assert_close(x @ other, x, b)  # the other order, which has no row
        trained = b.clone().requires_grad_()
        with torch.enable_grad():
            (x @ trained).sum().backward()
        assert trained.grad is not None
    for with_bias, out in zip((False,) * 4 + (True, False, True), served, strict=True):
        assert torch.equal(out.view(M, N), tritongemm.mm(x, b.t(), bias if with_bias else None))
        assert_close(out.view(M, N), x, b, bias if with_bias else None)
    x.copy_(normal(M, K))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(captured, x, b)


def test_what_no_row_is_for_is_pytorchs() -> None:
    """Only a linear layer's rows are loaded; a view comes first."""
    tritongemm.load(rows(CONFIGS["tile"], "TN"))
    x, w = normal(M, K), normal(N, K)
    view = w.t().contiguous().t()
    for _ in range(2):
        assert torch.equal(tritongemm.mm(x, view), functional.linear(x, view))
        assert_close(tritongemm.mm(x, w), x, w.t())
    assert "_TT was never tuned" in tritongemm.explain(x, view) and tritongemm.explain(x, w).startswith("exact")
    wide = normal(N, 2 * K)[:, :K]
    assert f"strides ({2 * K}, 1)" in tritongemm.explain(x, wide)
    assert torch.equal(tritongemm.mm(x, wide), functional.linear(x, wide))


def test_compiled(dispatcher: Dispatcher) -> None:
    torch._dynamo.reset()
    tritongemm.load(rows(CONFIGS["tile"], "TT"))
    b = normal(K, N)
    compiled = torch.compile(lambda x: tritongemm.mm(x, b.t()).relu(), dynamic=True, fullgraph=True)
    for m in (M, 3, 40, 80):
        x = normal(m, K)
        for _ in range(2):
            exact = (x.double() @ b.double()).relu()
            assert verify.deviation(compiled(x), exact) < 0.02
    assert any(type(call).__name__ == "CallsByLayout" for call in dispatcher.calls.table.values())

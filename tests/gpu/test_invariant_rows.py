from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritongemm
from tests.gpu.here import replayed
from tests.support.nouns import Config, Defaults, Dispatcher, Machine, Patch, Record
from tritongemm.tune.request import Outputs, SearchScope, SizeSource, TuneRequest

N, K, MOST = 1056, 1920, 300  # a K that splits do not cut evenly, so that its order is that of an unsplit K
SOME = (1, 2, 5, 16, 17, 64, 100, 256, MOST)


@pytest.fixture(autouse=True)
def empty(gpu_machine: Machine, dispatcher: Dispatcher) -> Dispatcher:
    dispatcher.load([])
    return dispatcher


def tune(path: Path, n: int, k: int, most: int, defaults: Defaults, invariant: bool | str = True) -> list[Record]:
    """An invariant table over M, tuned quickly."""
    source = SizeSource(n=n, k=k, m_range=(1, most), defaults=defaults)
    request = replace(TuneRequest(), sizes=source, search=SearchScope(effort="quick"), outputs=Outputs(path))
    return list(tritongemm.autotune(replace(request, invariant=invariant)))


def operands(n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    x, w = (torch.randn(rows, k, device="cuda", generator=generator).bfloat16() for rows in (MOST, n))
    return x, w


def assert_invariant(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of the product of all are those of every part of the batch; returns the product, of fp8 with a scale."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return tritongemm.mm(x, w) if scale is None else tritongemm.linear_fp8(x, w, scale)

    every, exact = multiply(x), w.double()
    for m in SOME:
        assert torch.equal(multiply(x[:m]), every[:m]), m
        assert torch.equal(multiply(x[-m:].contiguous()), every[-m:]), f"the last {m}"
    if scale is not None:
        exact *= scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = x.double() @ exact.t()
    assert float((every.double() - exact).abs().max()) < (0.05 if scale is None else 0.1) * float(exact.abs().max())
    return every


@pytest.fixture(scope="module")
def table(gpu_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """An invariant table over M, tuned quickly, with the library's algorithms."""
    path = tmp_path_factory.mktemp("tuned") / "invariant.yaml"
    return tune(path, N, K, 256, Defaults.of("bf16", layout="TN"), "library")


def test_untuned_kernels(empty: Dispatcher, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    x, w = operands()
    assert tritongemm.explain(x, w).startswith("invariant: ")
    assert_invariant(x, w)


def test_rows_of_a_table_and_untuned_kernels_beyond(empty: Dispatcher, table: list[Record], monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    assert {r.order for r in table} == {f"1x{K}"} and len({r.row_bits for r in table}) == 1
    x, w = operands()
    untuned = assert_invariant(x, w)
    empty.load(table)
    for m, kind in ((1, ("exact", "range")), (100, ("exact", "range")), (MOST, ("invariant",))):
        assert tritongemm.explain(x[:m], w).startswith(kind), tritongemm.explain(x[:m], w)
    assert torch.equal(assert_invariant(x, w), untuned), "an order gives the same bits whichever kernels have it"


def test_narrow_products_have_one_order_rows_or_not(empty: Dispatcher, tmp_path: Path, monkeypatch: Patch) -> None:
    n, k = 1280, 8192
    table = tune(tmp_path / "t.yaml", n, k, 128, Defaults.of("bf16", layout="TN"))
    assert len({(r.order, r.row_bits) for r in table}) == 1, {r.order for r in table}
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    empty.load(table)
    x, w = operands(n, k)
    assert tritongemm.explain(x, w).startswith("invariant")
    assert_invariant(x, w)


def test_rows_that_claim_order_or_bits_do_not_serve(empty: Dispatcher, table: list[Record], monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    x, w = operands()
    wrong = replace(table[0], config=Config("tile", 16, 64, 64, 1, 4, 4, 3), winner="triton", m_from=0)
    empty.load([wrong])
    with pytest.warns(UserWarning, match="adds up in the order 4x512"):
        assert tritongemm.explain(x[: wrong.problem.m], w).startswith("invariant")


def test_a_patched_model_gives_a_sequence_the_same_bits_alone_and_in_a_batch(empty: Dispatcher) -> None:
    layers = [torch.nn.Linear(K, N, bias=True), torch.nn.GELU(), torch.nn.Linear(N, K, bias=False)]
    model = torch.nn.Sequential(*layers).cuda().bfloat16()
    patch = tritongemm.patch(model, [], invariant=True)
    x, _ = operands()
    every = model(x)
    for m in (1, 16, 64):
        assert torch.equal(model(x[:m]), every[:m])
        assert torch.equal(replayed(model, x[:m].clone()), every[:m])
    patch.undo()


def test_fp8_blocks_have_equal_bits_by_rows_and_untuned(empty: Dispatcher, tmp_path: Path, monkeypatch: Patch) -> None:
    """Activations are quantised row by row; at some M a row of the table serves, at others an untuned kernel."""
    n = 1024
    table = tune(tmp_path / "fp8.yaml", n, K, 128, Defaults.of(layout="TN", family="a8w8_blockscale"))
    assert {r.order for r in table} == {f"1x{K} blocks of 128 by wgmma"} and len({r.row_bits for r in table}) == 1
    monkeypatch.setenv("TRITONGEMM_INVARIANT", "1")
    empty.load(table)
    x, _ = operands()
    weight = torch.randn(n, K, device="cuda").mul(64).clamp(-440, 440).to(torch.float8_e4m3fn)
    scale = torch.rand(n // 128, K // 128, device="cuda") / 64 + 0.001
    assert_invariant(x, weight, scale)

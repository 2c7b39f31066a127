"""Whether activations are quantised: by the times of loaded rows, with the quantisation and without it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritongemm
from tests.support.linear_layers import StandInKernel, record, stand_in_kernels
from tests.support.nouns import Dispatcher, InputError, Patch, Record, Support, apart, verify
from tests.support.products import product
from tritongemm.operations.factors import find_scalings, spread
from tritongemm.operations.served_problems import layer_problem
from tritongemm.serving import linear_fp8 as layer

N, K, FP8 = 256, 512, "fp8e4m3fn"
TYPES = ("bf16", "bf16", "bf16")


def scaled(m: int, scales: str = "", family: str = "a8w8_blockscale", **changes: Any) -> Record:
    """A row of the quantised product: 5 us, and 3 us for quantising A."""
    made = {"seconds": 5e-6, "quantize_seconds": 3e-6, **changes}
    return replace(record(product(family, m, N, K, FP8, scales)), **made)


def plain(m: int, seconds: float, **changes: Any) -> Record:
    return replace(record(layer_problem((m, N, K), TYPES, "none")), seconds=seconds, **changes)


@pytest.fixture
def dispatcher(unloaded: Dispatcher) -> Iterator[Dispatcher]:
    with torch.no_grad():
        yield unloaded


def hold(dispatcher: Dispatcher, *rows: Record, refused: Record | None = None) -> None:
    """Have the CPU launch kernels of these rows, all but that of one."""
    dispatcher.load(rows)
    loaded: dict[Any, Any] = {r.problem: StandInKernel() for r in rows}
    if refused is not None:
        loaded[refused.problem] = Support("no such kernel")
    dispatcher._devices[-1] = stand_in_kernels(dispatcher._records, loaded)


def operands(m: int, scale: tuple[int, ...] = (N // 128, K // 128)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(m)
    weight, factors = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(scale) + 0.5
    entire = weight.float() * spread(factors, find_scalings(factors, N, K, "")[0], N, K)
    return torch.randn(m, K, dtype=torch.bfloat16), weight, factors, entire.bfloat16()


def explained(m: int, **more: Any) -> str:
    x, weight, factors, entire = operands(m, **more)
    return tritongemm.explain("linear_fp8", x, weight, factors, unquantized=entire).splitlines()[0]


def test_the_faster_way_is_computed(dispatcher: Dispatcher, monkeypatch: Patch) -> None:
    hold(dispatcher, scaled(16), plain(16, 7e-6), scaled(64), plain(64, 9e-6))
    calls: list[int] = []

    def multiply(*given: Any) -> Tensor:
        calls.append(given[0].shape[0])
        return tritongemm.mm(*given)

    monkeypatch.setattr(layer, "mm", multiply)
    for m in (16, 64, 64, 16, 3):
        x, weight, factors, entire = operands(m)
        found = layer.linear_fp8(x, weight, factors, None, None, entire)
        assert verify.deviation(found, x.double() @ entire.double().T) < (0.01 if m == 16 else 0.2)
        assert verify.deviation(layer.linear_fp8(x, weight, factors), found.double()) < 0.2
    assert calls == [16, 16]
    times = "fp8e4m3fn-fp8e4m3fn-bf16 5.00 us and quantising A 3.00 us"
    assert explained(16) == f"unquantised: {times} >= bf16 7.00 us"
    assert explained(64) == f"quantised: {times} < bf16 9.00 us"
    lacking = tritongemm.explain("linear_fp8", *operands(16)[:3]).splitlines()[0]
    assert lacking == f"quantised: {times} >= bf16 7.00 us, but no unquantised weight is given"
    hold(dispatcher, plain(16, 8.1e-6))  # what was found is found anew
    assert explained(16).startswith("quantised: ")


@apart(
    ((scaled(16),), "quantised: .*bf16.* was never tuned"),
    ((plain(16, 1e-6),), "quantised: .*fp8.* was never tuned"),
    ((scaled(16, quantize_seconds=None), plain(16, 1e-6)), "quantised: .*does not say how long A is quantised"),
    ((scaled(16), plain(16, 1e-6, timer="model")), "quantised: .*bf16.* was predicted, not measured"),
    ((scaled(16), plain(16, 8e-6)), "unquantised: .* >= "),
    ((scaled(16), plain(16, 9e-6, winner="torch", library_seconds=7e-6)), "unquantised: .* 7.00 us"),
    ((scaled(32, m_from=9), plain(64, 7e-6, m_from=1)), "unquantised: "),
    ((scaled(64, m_from=9), plain(32, 7e-6, m_from=1)), "quantised: .* was timed at M 32, .* at 64"),
)
def test_comparable_rows_decide(rows: tuple[Record, ...], answer: str, /, dispatcher: Dispatcher) -> None:
    hold(dispatcher, *rows)
    dispatcher._devices[-1].loaded_ranges.update({r.problem: StandInKernel() for r in rows if r.m_from})
    assert re.match(answer, explained(16)), explained(16)


def test_refused_kernels_foreign_weights_and_compiled_code(dispatcher: Dispatcher) -> None:
    """The library that computes a bf16 product takes 3 us, ours would take 9."""
    hold(dispatcher, scaled(16), plain(16, 9e-6), refused=plain(16, 9e-6))
    assert explained(16).startswith("unquantised: ")
    x, weight, factors, entire = operands(16)
    for wrong in (entire.half(), entire[:, :128]):
        with pytest.raises(InputError, match=r"of this layer it is torch.bfloat16 \(256, 512\) on cpu"):
            layer.linear_fp8(x, weight, factors, unquantized=wrong)
    hold(dispatcher, scaled(16), plain(16, 7e-6))
    compiled = torch.compile(layer.linear_fp8, fullgraph=True, backend="eager")
    x, weight, factors, entire = operands(16)
    assert torch.equal(compiled(x, weight, factors, None, None, entire), nn.functional.linear(x, entire))


@pytest.mark.parametrize(("scales", "shape"), [("row", (N,)), ("row", (1,))])
def test_factors_of_rows(dispatcher: Dispatcher, scales: str, shape: tuple[int, ...]) -> None:
    hold(dispatcher, scaled(16, scales, "a8w8"), plain(16, 7e-6))
    assert explained(16, scale=shape).startswith("unquantised: ")


def kept(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if "unquantized" in name]


def test_patched_layers_keep_their_weight_where_that_pays(dispatcher: Dispatcher) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = nn.Sequential(fp8.FP8Linear(K, N, block_size=(128, 128)))
    x, weight, factors, entire = operands(16)
    state = {"0.weight": weight, "0.weight_scale_inv": factors}
    model.load_state_dict(state)
    hold(dispatcher, scaled(16), plain(16, 9e-6))
    patched = tritongemm.patch(model, keep_unquantized=True)
    assert patched.patched == ("0",) and not kept(model)
    patched.undo()
    hold(dispatcher, plain(16, 7e-6))
    patched = tritongemm.patch(model, keep_unquantized=True)
    assert kept(model) == ["0.weight_unquantized"] and model.state_dict().keys() == state.keys()
    assert torch.equal(model(x), nn.functional.linear(x, entire))
    assert verify.deviation(model(x.float()), x.double() @ entire.double().T) < 0.2  # of another type
    model.load_state_dict(state)
    assert not kept(model)
    patched.undo()
    patched = tritongemm.patch(model, keep_unquantized=True)
    assert kept(model)
    patched.undo()
    assert not kept(model) and type(model[0]) is fp8.FP8Linear

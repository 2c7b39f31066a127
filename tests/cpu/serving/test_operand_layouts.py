from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.cpu.serving.conftest import Gpu
from tests.support.linear_layers import StandInKernel, attach_device, problem, record
from tests.support.served_region import gpu_that_serves
from tritongemm.core.record import Record
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.serve import ServedRegion


def row(m: int, layout: str = "TT", n: int = 32, m_from: int = 0) -> Record:
    return record(problem(m, n, 64).stored(layout[0] == "T", layout[1] == "T"), m_from=m_from)


def attach(dispatcher: Dispatcher, *records: Record) -> None:
    dispatcher.load(records)
    kernels = attach_device(dispatcher)
    for one in records:
        (kernels.loaded_ranges if one.m_from else kernels.loaded)[one.problem] = Named(one.problem.key)
        kernels.binders[one.problem, one.m_from] = partial(lambda key, m: Named(key), one.problem.key)


def wide(rows: int, columns: int) -> Tensor:
    """Some columns of a matrix, whose rows are no neighbours in memory."""
    return torch.empty_strided((rows, columns), (columns + 8, 1), dtype=torch.bfloat16, device="cuda:0")


class Named(StandInKernel):
    def __init__(self, key: str) -> None:
        self.key = key


@pytest.fixture
def gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    def prepare(kernel: Named, *others: object) -> Callable[..., object]:
        def call(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> object:
            if not (x.is_contiguous() and w.is_contiguous()):
                return others[-1](x, w, bias, out_dtype)  # type: ignore[operator]
            return kernel.key

        return call

    monkeypatch.setattr("tritongemm.serving.launching.FastCall", prepare)
    monkeypatch.setattr("tritongemm.serving.launching.OperandCall", lambda *given: lambda *_: given[4].key)
    return gpu


@pytest.mark.parametrize("order", [1, -1])
def test_each_layout_is_served_by_its_own_row_whichever_is_called_first(gpu: Gpu, order: int) -> None:
    dispatcher, empty = gpu
    attach(dispatcher, row(16, "TN"), row(16), row(16, "NT"), row(64, m_from=17))
    x, x_view, w, w_view = empty(16, 64), empty(64, 16).t(), empty(32, 64), empty(64, 32).t()
    calls = [((x, w), "TN"), ((x, w_view), "TT"), ((x_view, w_view), "NT"), ((empty(4, 4, 64), w_view), "TT")]
    for operands, layout in [*calls, *calls][::order]:
        assert dispatcher.run(*operands, None, None) == f"16x32x64_bf16_{layout}"
        assert str(dispatcher.explain(*operands)).startswith("exact")
    assert dispatcher.run(x_view, w, None, None).shape == (16, 32), "no row is for this one"
    assert dispatcher.run(empty(40, 64), w_view, None, None) == "64x32x64_bf16_TT"
    assert str(dispatcher.explain(empty(40, 64), w_view)).startswith("range: M 17 to 64")
    assert dispatcher.run(empty(65, 64), w_view, None, None).shape == (65, 32)
    assert dispatcher.run(x, wide(32, 64), None, None).shape == (16, 32), "neither rows nor columns are dense"
    assert "w has strides (72, 1); kernels take dense matrices" in str(dispatcher.explain(x, wide(32, 64)))
    assert dispatcher.run(empty(2, 4, 2, 64).transpose(0, 1), w, None, None).shape == (4, 2, 2, 32)


def test_views_that_come_first_and_matrices_of_one_column(gpu: Gpu) -> None:
    dispatcher, empty = gpu
    attach(dispatcher, row(16, "TN"))
    x, w, w_view = empty(16, 64), empty(32, 64), empty(64, 32).t()
    for _ in range(2):
        assert dispatcher.run(x, w_view, None, None).shape == (16, 32)
        assert dispatcher.run(x, w, None, None) == "16x32x64_bf16_TN"
    attach(dispatcher, row(16, n=1), row(1, "NN"))
    for w in (empty(1, 64), empty(64, 1).t()):
        assert dispatcher.run(empty(16, 64), w, None, None) == "16x1x64_bf16_TT"
    assert dispatcher.run(empty(1, 64), empty(32, 64), None, None) == "1x32x64_bf16_NN"


def test_pytorchs_products_of_row_major_matrices_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher()
    rows = [row(16), replace(row(16), problem=replace(row(16).problem, bias="n")), row(8, "TN"), row(8, "NT")]
    with gpu_that_serves(monkeypatch, dispatcher, rows) as (served, make), ServedRegion(None, dispatcher):
        x, b, bias = make(16, 64), make(64, 32), make(32)
        calls: list[Callable[[], Tensor]] = [
            lambda: torch.mm(x, b),
            lambda: torch.matmul(x, b),
            lambda: x @ b,
            lambda: x.view(4, 4, 64) @ b,
            lambda: torch.addmm(bias, x, b),
            lambda: functional.linear(x, b.t(), bias),
            lambda: make(8, 64) @ make(32, 64).t(),
            lambda: make(64, 8).t() @ b,
        ]
        for number, call in enumerate(calls, 1):
            assert call().shape[-1] == 32 and len(served.shapes) == number
        others: list[Callable[[], Tensor]] = [
            lambda: x @ make(32, 64).t(),
            lambda: make(8, 64) @ b,
            lambda: make(17, 64) @ b,
            lambda: x @ wide(64, 32),
            lambda: wide(16, 64) @ b,
        ]
        for call in others:
            assert call().shape[-1] == 32
        assert len(served.shapes) == len(calls)

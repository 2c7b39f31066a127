"""Who serves a call, by its operands and the records: on stand-ins of a GPU and its kernels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tritongemm
from tests.support.linear_layers import TILE, problem, record
from tritongemm.core.errors import DriverError, InputError
from tritongemm.runtime import loaded_kernels
from tritongemm.serve import torch_fallback
from tritongemm.serve.dispatcher import Dispatcher


def device(kernels: dict | None = None, direct: object = None, rounding: tuple = ()) -> SimpleNamespace:
    """Stands in for `Served`; PyTorch's kernels are all `direct`."""
    find = SimpleNamespace(find=lambda *_: direct)
    return SimpleNamespace(arch="sm90", kernels=kernels or {}, index=0, direct=find, rounding=rounding)


@pytest.fixture
def gpu(monkeypatch):
    """(fake tensors of [rows, K] and friends on a GPU, a dispatcher that believes in an sm90 there)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatcher = Dispatcher()
    dispatcher._read = True
    dispatcher._devices[0] = device()
    with FakeTensorMode():
        yield dispatcher, lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="cuda:0")


def say(dispatcher, *operands, out_dtype=None):
    return str(dispatcher.verdict(*operands, *[None] * (3 - len(operands)), out_dtype))


def test_explains_a_fallback(gpu):
    dispatcher, empty = gpu
    x, w = empty(16, 64), empty(32, 64)
    assert say(dispatcher, x, w) == "fallback: 16x32x64_bf16_TN was never tuned for sm90"
    dispatcher.load([record(problem(16, 32, 64), target="gfx942"), record(problem(8, 32, 64), timer="model")])
    dispatcher._devices[0] = device()
    assert say(dispatcher, x, w) == "fallback: 16x32x64_bf16_TN was tuned for gfx942; this GPU is sm90"
    assert "prediction" in say(dispatcher, empty(8, 64), w)
    assert say(dispatcher, x, w, empty(32, dtype=torch.float32)).endswith("kernels take bfloat16 (32,)")
    assert "never tuned" in say(dispatcher, x, w, empty(32))
    assert "torch.float64" in say(dispatcher, empty(16, 64, dtype=torch.float64), w)
    assert "not [..., K] and [N, K]" in say(dispatcher, empty(16, 63), w)
    assert "empty" in say(dispatcher, empty(0, 64), w)
    assert "never tuned" in say(dispatcher, x, w, out_dtype=torch.float32)


def test_explains_the_library_and_a_kernel(gpu):
    dispatcher, empty = gpu
    won, lost = record(problem(16, 32, 64)), record(problem(2, 32, 64), winner="torch")
    assert dispatcher.load([won, lost, record(replace(won.problem, row_major_b=True))]) == 2
    kernel = loaded_kernels.TunedKernel(won, None, None)
    dispatcher._devices[0] = device({won.problem: kernel})
    w = empty(32, 64)
    assert say(dispatcher, empty(4, 4, 64), w) == f"exact: {TILE.name} (2.00 us, 1.50x torch)"
    assert say(dispatcher, empty(1, 2, 64), w) == "library: torch won the tuning of 2x32x64_bf16_TN on sm90"
    dispatcher._devices[0].kernels[won.problem] = "out_of_resources: shared memory 9 > 8 bytes"
    assert say(dispatcher, empty(16, 64), w).endswith("on sm90: out_of_resources: shared memory 9 > 8 bytes")


def test_what_no_tuned_kernel_serves_is_pytorchs_own(gpu):
    dispatcher, empty = gpu
    dispatcher.load([record(problem(2, 32, 64), winner="torch")])
    direct = object()
    dispatcher._devices[0] = device(direct=direct)
    for rows, kind, since in ((2, "library", ""), (3, "fallback", " from call 64 on")):
        verdict = dispatcher.verdict(empty(1, rows, 64), empty(32, 64), None, None)
        assert verdict.kind == kind and verdict.kernel is direct and verdict.lasting
        assert str(verdict).endswith(f"; PyTorch's kernel, called directly{since}")
    assert dispatcher.verdict(empty(64), empty(32, 64), None, None).kernel is None


def test_a_size_never_tuned_is_asked_for_once_it_is_called_often(gpu, monkeypatch):
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.serve.dispatcher._OFTEN", 3)
    direct, made = object(), []

    def call(kernel, served, shape, dtype):
        made.append((kernel, shape, dtype))
        return lambda x, w, bias, out_dtype: "called directly"

    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", call)
    dispatcher._devices[0] = device(direct=direct)
    x, w = empty(2, 3, 64), empty(32, 64)
    assert [dispatcher.run(x, w, None, None).shape for _ in range(2)] == [(2, 3, 32)] * 2 and not made
    assert [dispatcher.run(x, w, None, None) for _ in range(3)] == ["called directly"] * 3
    assert made == [(direct, (2, 3, 32), torch.bfloat16)]
    # What PyTorch takes a detour for is not its linear layer.
    assert [dispatcher.run(empty(4, 64), w, None, torch.float64).dtype for _ in range(5)] == [torch.float64] * 5
    dispatcher.load([record(problem(9, 32, 64), winner="torch")])
    dispatcher._devices[0] = device(direct=direct)
    assert dispatcher.run(empty(9, 64), w, None, None) == "called directly"


@pytest.fixture
def precision(monkeypatch):
    """Sets PyTorch's float32 precision."""

    def be(value: str) -> None:
        monkeypatch.setattr("tritongemm.serve.dispatcher.precision", lambda: value)

    return be


def test_kernels_tuned_in_tf32_serve_while_pytorch_is_set_to_it(gpu, precision):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    expected = {("tf32", True): "exact", ("tf32", False): "exact", ("fp32", False): "exact", ("fp32", True): "fallback"}
    for (now, rounds), kind in expected.items():
        precision(now)
        kernels = {won.problem: loaded_kernels.TunedKernel(won, None, None)}
        dispatcher._devices[0] = device(kernels, rounding=(won.problem,) if rounds else ())
        verdict = dispatcher.verdict(x, w, None, None)
        assert verdict.kind == kind
    assert "tuned in tf32, while PyTorch multiplies float32 in full" in str(verdict)
    kernels[won.problem] = "out_of_resources: shared memory 9 > 8 bytes"
    assert "out_of_resources" in say(dispatcher, x, w)


def test_float32_follows_pytorchs_precision(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    kernel, direct = loaded_kernels.TunedKernel(won, None, None), object()
    dispatcher._devices[0] = device({won.problem: kernel}, direct, rounding=(won.problem,))
    made = []

    def call(given, *_):
        made.append(given)
        return lambda *_: "tuned" if given is kernel else "PyTorch's"

    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", call)
    monkeypatch.setattr("tritongemm.serve.dispatcher._OFTEN", 1)
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    for _ in range(3):  # and nothing is made anew
        for now, who in (("tf32", "tuned"), ("fp32", "PyTorch's")):
            precision(now)
            assert [dispatcher.run(x, w, None, None) for _ in range(3)] == [who] * 3
    assert made == [kernel, direct]


def test_a_change_of_precision_need_not_wait(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    dispatcher._devices[0] = device({won.problem: loaded_kernels.TunedKernel(won, None, None)}, rounding=(won.problem,))
    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", lambda *_: lambda *_: "tuned")
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    precision("fp32")
    assert dispatcher.run(x, w, None, None).shape == (16, 32)
    precision("tf32")
    assert dispatcher.run(x, w, None, None) == "tuned"


def test_a_change_of_precision_while_a_call_is_made_ready(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    dispatcher._devices[0] = device({won.problem: loaded_kernels.TunedKernel(won, None, None)}, rounding=(won.problem,))

    def call(*_):
        precision("fp32")  # another thread's doing
        return lambda *_: "tuned"

    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", call)
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    precision("tf32")
    assert dispatcher.run(x, w, None, None) == "tuned"
    assert dispatcher.run(x, w, None, None).shape == (16, 32)


def test_mm_itself_follows_pytorchs_precision(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    seen = []
    monkeypatch.setattr("tritongemm.serve.api.DISPATCHER", dispatcher)
    monkeypatch.setattr("tritongemm.serve.api._modes", lambda: 0)  # fake tensors are one
    monkeypatch.setattr("tritongemm.serve.api._PLAIN", {type(empty(1))})
    monkeypatch.setattr(dispatcher, "plan", lambda key, now, *_: seen.append(now) or (lambda *_: None))
    for now in ("tf32", "fp32"):
        monkeypatch.setattr("tritongemm.serve.api.precision", lambda now=now: now)
        for dtype in (torch.float32, torch.bfloat16):
            x, w, bias = empty(3, 64, dtype=dtype), empty(32, 64, dtype=dtype), empty(32, dtype=dtype)
            tritongemm.mm(x, w)
            tritongemm.mm(x, w, bias)
    assert seen == ["tf32", "tf32", None, None, "fp32", "fp32", None, None]


@pytest.mark.parametrize("old", [False, True])
def test_precision_is_what_pytorch_is_set_to(monkeypatch, old):
    if old:
        monkeypatch.setattr(torch_fallback, "_precision", None)
    try:
        for name, value in (("high", "tf32"), ("highest", "fp32"), ("high", "tf32")):
            torch.set_float32_matmul_precision(name)
            assert torch_fallback.precision() == value
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_capture_puts_off_the_question(gpu, monkeypatch):
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.serve.dispatcher._OFTEN", 2)
    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", lambda *_: lambda *_: "called directly")
    answers = [None, None, object()]
    dispatcher._devices[0] = device()
    dispatcher._devices[0].direct.find = lambda *_: answers.pop(0)
    x, w = empty(3, 64), empty(32, 64)
    dispatcher.run(x, w, None, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [dispatcher.run(x, w, None, None).shape for _ in range(2)] == [(3, 32)] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert dispatcher.run(x, w, None, None) == "called directly" and not answers


def test_what_fails_on_the_way_to_pytorchs_kernel_leaves_it_to_pytorch(gpu, monkeypatch):
    dispatcher, empty = gpu

    def fails(*_):
        raise DriverError("cublasLtMatmulDescCreate", 3, "CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr("tritongemm.serve.dispatcher.FastCall", fails)
    monkeypatch.setattr("tritongemm.serve.dispatcher._OFTEN", 2)
    x, w = empty(3, 64), empty(32, 64)
    dispatcher._devices[0] = device(direct=object())
    assert [dispatcher.run(x, w, None, None).shape for _ in range(4)] == [(3, 32)] * 4
    won = record(problem(3, 32, 64))
    dispatcher.load([won])
    dispatcher._devices[0] = device({won.problem: loaded_kernels.TunedKernel(won, None, None)})
    with pytest.raises(DriverError):
        dispatcher.run(x, w, None, None)


def test_explains_operands_on_the_cpu():
    assert tritongemm.explain(torch.empty(2, 8), torch.empty(4, 8)) == (
        "fallback: x is on cpu; tuned kernels run on a GPU"
    )


def test_the_environment_names_the_records(gpu, tmp_path, monkeypatch):
    from tritongemm.formats import tune_gemm

    _, empty = gpu
    file = tmp_path / "tuned.yaml"
    file.write_text(tune_gemm.write([record(problem(16, 32, 64), winner="torch")]))
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    made = device()
    monkeypatch.setattr("tritongemm.serve.dispatcher.DeviceKernels", lambda *_: made)
    assert say(Dispatcher(), empty(16, 64), empty(32, 64)).startswith("library: torch won")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(tmp_path / "gone.yaml"))
    with pytest.raises(InputError, match=r"gone\.yaml"):
        say(Dispatcher(), empty(16, 64), empty(32, 64))


def test_nothing_is_loaded_while_capturing(gpu, monkeypatch):
    _, empty = gpu
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    verdict = Dispatcher().verdict(empty(16, 64), empty(32, 64), None, None)
    assert verdict.kind == "fallback" and not verdict.lasting and "before a graph is captured" in verdict.text

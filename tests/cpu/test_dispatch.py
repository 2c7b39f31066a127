"""Serving without a GPU: PyTorch's fallback, what `explain` says, and tracing."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import tritongemm
from tritongemm import fallback, loaded, settings
from tritongemm.config import Config
from tritongemm.dispatch import Dispatcher, records_of, servable
from tritongemm.errors import DriverError, InputError
from tritongemm.fallback import linear
from tritongemm.operation import DISPATCHER
from tritongemm.problem import Problem
from tritongemm.record import Record

TILE = Config("tile", 16, 32, 32, split_k=2, num_warps=4, num_stages=2)


def problem(m: int, n: int, k: int, bias: str = "none", dtype: str = "bf16") -> Problem:
    return Problem(m, n, k, dtype, dtype, dtype, row_major_b=False, bias=bias)


def record(of: Problem, config: Config = TILE, **changes: object) -> Record:
    toolchain = {"triton": settings.version("triton")}
    made = Record(of, "sm90", config, "triton", 2e-6, 0.01, "events", toolchain=toolchain, library="torch")
    return replace(made, library_seconds=3e-6, **changes)


def device(kernels: dict | None = None, direct: object = None, rounding: tuple = ()) -> SimpleNamespace:
    """Stands in for `Served`; PyTorch's kernels are all `direct`."""
    find = SimpleNamespace(find=lambda *_: direct)
    return SimpleNamespace(arch="sm90", kernels=kernels or {}, index=0, direct=find, rounding=rounding)


@pytest.mark.parametrize("lead", [(), (7,), (2, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_linear(lead, with_bias, dtype):
    x, w = torch.randn(*lead, 24).to(dtype), torch.randn(10, 24).to(dtype)
    bias = torch.randn(10).to(dtype) if with_bias else None
    assert torch.equal(tritongemm.mm(x, w, bias), functional.linear(x, w, bias))
    assert tritongemm.mm(x, w, bias).shape == (*lead, 10)


def test_any_strides_are_right():
    x, w = torch.randn(24, 6).T, torch.randn(24, 10).T
    assert torch.equal(tritongemm.mm(x, w), functional.linear(x, w))


def test_another_output_dtype_is_not_rounded_twice():
    x, w, bias = torch.randn(5, 64).bfloat16(), torch.randn(9, 64).bfloat16(), torch.randn(9)
    out = tritongemm.mm(x, w, bias, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, functional.linear(x.float(), w.float(), bias))
    assert tritongemm.mm(x.float(), w.float(), bias, torch.bfloat16).dtype == torch.bfloat16


def test_eight_bit_operands():
    x, w = torch.randint(-100, 100, (20, 64), dtype=torch.int8), torch.randint(-100, 100, (8, 64), dtype=torch.int8)
    exact = x.long() @ w.long().T
    assert torch.equal(tritongemm.mm(x, w).long(), exact) and tritongemm.mm(x, w).dtype == torch.int32
    a, b = torch.randn(4, 32).to(torch.float8_e4m3fn), torch.randn(8, 32).to(torch.float8_e4m3fn)
    assert torch.equal(tritongemm.mm(a, b), (a.float() @ b.float().T).half())


def test_wrong_shapes_are_refused_as_pytorch_does():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tritongemm.mm(torch.randn(2, 8), torch.randn(4, 9))


def test_gradients_flow():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    tritongemm.mm(x, w).sum().backward()
    assert torch.equal(x.grad, w.sum(0).expand(3, 8))


def test_forward_derivatives_flow(monkeypatch):
    forward = torch.autograd.forward_ad
    x, w, tangent = torch.randn(3, 8), torch.randn(4, 8), torch.randn(3, 8)
    tritongemm.mm(x, w)
    # Were the call planned, it would lose the tangent.
    monkeypatch.setattr(DISPATCHER, "plan", lambda *_: pytest.fail("planned"))
    monkeypatch.setattr(DISPATCHER.calls, "table", {})
    with forward.dual_level():
        out = tritongemm.mm(forward.make_dual(x, tangent), w)
        torch.testing.assert_close(forward.unpack_dual(out).tangent, tangent @ w.T)


def test_autocast_casts_as_a_linear_layer():
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tritongemm.mm(x, w), functional.linear(x, w))


def test_transforms_and_tracers_see_it():
    x, w = torch.randn(5, 3, 8), torch.randn(4, 8)
    assert torch.equal(torch.vmap(lambda one: tritongemm.mm(one, w))(x), functional.linear(x, w))
    traced = torch.jit.trace(lambda x, w: tritongemm.mm(x, w), (x, w))
    other = torch.randn(5, 3, 8)
    assert torch.equal(traced(other, w), functional.linear(other, w))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(backend, dynamic):
    torch._dynamo.reset()
    bias = torch.randn(4)
    compiled = torch.compile(
        lambda x, w: tritongemm.mm(x, w, bias).relu() + 1, fullgraph=True, backend=backend, dynamic=dynamic
    )
    with torch.no_grad():
        for rows in (3, 5):
            x, w = torch.randn(2, rows, 8), torch.randn(4, 8)
            torch.testing.assert_close(compiled(x, w), functional.linear(x, w, bias).relu() + 1)


def test_the_graph_holds_one_operation():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x, w: tritongemm.mm(x, w), fullgraph=True, backend=keep)(torch.randn(3, 8), torch.randn(4, 8))
    assert [n.target for n in graphs[0].graph.nodes if n.op == "call_function"] == [torch.ops.tritongemm.mm]


def test_compiled_gradients_are_pytorchs():
    torch._dynamo.reset()
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    torch.compile(lambda x: tritongemm.mm(x, w).sum(), fullgraph=True, backend="aot_eager")(x).backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, 8))


def test_fake_tensors_and_the_operation_itself():
    with FakeTensorMode():
        out = tritongemm.mm(torch.empty(2, 3, 8), torch.empty(4, 8), None, torch.bfloat16)
        assert out.shape == (2, 3, 4) and out.dtype == torch.bfloat16
    args = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4), torch.float32
    torch.library.opcheck(torch.ops.tritongemm.mm.default, args)


def test_importing_is_light():
    code = """
import sys, time, torch
start = time.process_time()
import tritongemm
tritongemm.mm
took = time.process_time() - start
heavy = [m for m in ("triton", "jinja2", "joblib", "yaml", "scipy", "sklearn", "rich") if m in sys.modules]
assert not heavy, heavy
assert took < 0.1, took
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tritongemm.__file__).parents[1])
    code = "import sys, tritongemm, tritongemm.tune, tritongemm.export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tritongemm.__file__).parents[1])


# What is said of tensors on a GPU, with tensors that pretend to be there.


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
    kernel = loaded.Kernel(won, None, None)
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
    monkeypatch.setattr("tritongemm.dispatch._OFTEN", 3)
    direct, made = object(), []

    def call(kernel, served, shape, dtype):
        made.append((kernel, shape, dtype))
        return lambda x, w, bias, out_dtype: "called directly"

    monkeypatch.setattr("tritongemm.dispatch.Call", call)
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
        monkeypatch.setattr("tritongemm.dispatch.precision", lambda: value)

    return be


def test_kernels_tuned_in_tf32_serve_while_pytorch_is_set_to_it(gpu, precision):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    expected = {("tf32", True): "exact", ("tf32", False): "exact", ("fp32", False): "exact", ("fp32", True): "fallback"}
    for (now, rounds), kind in expected.items():
        precision(now)
        kernels = {won.problem: loaded.Kernel(won, None, None)}
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
    kernel, direct = loaded.Kernel(won, None, None), object()
    dispatcher._devices[0] = device({won.problem: kernel}, direct, rounding=(won.problem,))
    made = []

    def call(given, *_):
        made.append(given)
        return lambda *_: "tuned" if given is kernel else "PyTorch's"

    monkeypatch.setattr("tritongemm.dispatch.Call", call)
    monkeypatch.setattr("tritongemm.dispatch._OFTEN", 1)
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
    dispatcher._devices[0] = device({won.problem: loaded.Kernel(won, None, None)}, rounding=(won.problem,))
    monkeypatch.setattr("tritongemm.dispatch.Call", lambda *_: lambda *_: "tuned")
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    precision("fp32")
    assert dispatcher.run(x, w, None, None).shape == (16, 32)
    precision("tf32")
    assert dispatcher.run(x, w, None, None) == "tuned"


def test_a_change_of_precision_while_a_call_is_made_ready(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    won = record(problem(16, 32, 64, dtype="fp32"))
    dispatcher.load([won])
    dispatcher._devices[0] = device({won.problem: loaded.Kernel(won, None, None)}, rounding=(won.problem,))

    def call(*_):
        precision("fp32")  # another thread's doing
        return lambda *_: "tuned"

    monkeypatch.setattr("tritongemm.dispatch.Call", call)
    x, w = empty(16, 64, dtype=torch.float32), empty(32, 64, dtype=torch.float32)
    precision("tf32")
    assert dispatcher.run(x, w, None, None) == "tuned"
    assert dispatcher.run(x, w, None, None).shape == (16, 32)


def test_mm_itself_follows_pytorchs_precision(gpu, precision, monkeypatch):
    dispatcher, empty = gpu
    seen = []
    monkeypatch.setattr("tritongemm.operation.DISPATCHER", dispatcher)
    monkeypatch.setattr("tritongemm.operation._modes", lambda: 0)  # fake tensors are one
    monkeypatch.setattr("tritongemm.operation._PLAIN", {type(empty(1))})
    monkeypatch.setattr(dispatcher, "plan", lambda key, now, *_: seen.append(now) or (lambda *_: None))
    for now in ("tf32", "fp32"):
        monkeypatch.setattr("tritongemm.operation.precision", lambda now=now: now)
        for dtype in (torch.float32, torch.bfloat16):
            x, w, bias = empty(3, 64, dtype=dtype), empty(32, 64, dtype=dtype), empty(32, dtype=dtype)
            tritongemm.mm(x, w)
            tritongemm.mm(x, w, bias)
    assert seen == ["tf32", "tf32", None, None, "fp32", "fp32", None, None]


@pytest.mark.parametrize("old", [False, True])
def test_precision_is_what_pytorch_is_set_to(monkeypatch, old):
    if old:
        monkeypatch.setattr(fallback, "_precision", None)
    try:
        for name, value in (("high", "tf32"), ("highest", "fp32"), ("high", "tf32")):
            torch.set_float32_matmul_precision(name)
            assert fallback.precision() == value
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_capture_puts_off_the_question(gpu, monkeypatch):
    dispatcher, empty = gpu
    monkeypatch.setattr("tritongemm.dispatch._OFTEN", 2)
    monkeypatch.setattr("tritongemm.dispatch.Call", lambda *_: lambda *_: "called directly")
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

    monkeypatch.setattr("tritongemm.dispatch.Call", fails)
    monkeypatch.setattr("tritongemm.dispatch._OFTEN", 2)
    x, w = empty(3, 64), empty(32, 64)
    dispatcher._devices[0] = device(direct=object())
    assert [dispatcher.run(x, w, None, None).shape for _ in range(4)] == [(3, 32)] * 4
    won = record(problem(3, 32, 64))
    dispatcher.load([won])
    dispatcher._devices[0] = device({won.problem: loaded.Kernel(won, None, None)})
    with pytest.raises(DriverError):
        dispatcher.run(x, w, None, None)


def test_explains_operands_on_the_cpu():
    assert tritongemm.explain(torch.empty(2, 8), torch.empty(4, 8)) == (
        "fallback: x is on cpu; tuned kernels run on a GPU"
    )


def test_which_records_serve(tmp_path):
    assert servable(problem(1, 2, 3)) and servable(problem(1, 2, 3, "n"))
    wrong = ({"row_major_b": True}, {"row_major_a": False}, {"bias": "m"}, {"batch": 2}, {"family": "other"})
    assert not any(servable(replace(problem(1, 2, 3), **change)) for change in wrong)
    file = tmp_path / "tuned.yaml"
    from tritongemm.interop import tune_gemm

    records = [record(problem(16, 32, 64)), record(problem(16, 32, 64), target="gfx942")]
    file.write_text(tune_gemm.write(records))
    assert records_of(file) == records
    file.write_text("- {M: 1, N: 2, K: 3}\n")
    with pytest.raises(InputError, match="no tuned result"):
        records_of(file)


def test_the_environment_names_the_records(gpu, tmp_path, monkeypatch):
    from tritongemm.interop import tune_gemm

    _, empty = gpu
    file = tmp_path / "tuned.yaml"
    file.write_text(tune_gemm.write([record(problem(16, 32, 64), winner="torch")]))
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    made = device()
    monkeypatch.setattr("tritongemm.dispatch.Served", lambda *_: made)
    assert say(Dispatcher(), empty(16, 64), empty(32, 64)).startswith("library: torch won")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(tmp_path / "gone.yaml"))
    with pytest.raises(InputError, match=r"gone\.yaml"):
        say(Dispatcher(), empty(16, 64), empty(32, 64))


def test_nothing_is_loaded_while_capturing(gpu, monkeypatch):
    _, empty = gpu
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    verdict = Dispatcher().verdict(empty(16, 64), empty(32, 64), None, None)
    assert verdict.kind == "fallback" and not verdict.lasting and "before a graph is captured" in verdict.text


def test_calls_are_kept_for_each_thread_and_dropped_by_load(monkeypatch):
    dispatcher = Dispatcher()
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    dispatcher.run(x, w, None, None)
    assert len(dispatcher.calls.table) == 1
    sizes = []
    thread = threading.Thread(target=lambda: sizes.append(len(dispatcher.calls.table)))
    thread.start()
    thread.join()
    assert sizes == [0]
    monkeypatch.setattr("tritongemm.dispatch._MOST_CALLS", 4)
    for rows in range(1, 20):
        dispatcher.run(torch.randn(rows, 8), w, None, None)
    assert len(dispatcher.calls.table) <= 4
    dispatcher.load([])
    assert not dispatcher.calls.table


def test_the_module_keeps_one_dispatcher():
    assert isinstance(DISPATCHER, Dispatcher)
    assert torch.equal(linear(torch.ones(1, 2), torch.ones(3, 2), None, None), torch.full((1, 3), 2.0))

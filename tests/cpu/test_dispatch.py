"""Serving without a GPU: PyTorch's fallback, what `explain` says, tracing, and launches made ready on stand-ins."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import tritongemm
from tritongemm import served, settings, target
from tritongemm.call import Call
from tritongemm.compile import Cache
from tritongemm.config import Config
from tritongemm.dispatch import Dispatcher, records_of, servable
from tritongemm.errors import InputError, UnavailableError
from tritongemm.fallback import linear
from tritongemm.hip_ext import libraries, serving, symbols
from tritongemm.launch import Launch
from tritongemm.operation import DISPATCHER
from tritongemm.problem import Problem
from tritongemm.record import Record

TILE = Config("tile", 16, 32, 32, split_k=2, num_warps=4, num_stages=2)
TMA = Config("tma", 64, 64, 64, num_warps=4, num_stages=2)
PERSISTENT = Config("persistent", 64, 64, 64, num_warps=4, num_stages=2)


def problem(m: int, n: int, k: int, bias: str = "none", dtype: str = "bf16") -> Problem:
    return Problem(m, n, k, dtype, dtype, dtype, row_major_b=False, bias=bias)


def record(of: Problem, config: Config = TILE, **changes: object) -> Record:
    toolchain = {"triton": settings.version("triton")}
    made = Record(of, "sm90", config, "triton", 2e-6, 0.01, "events", toolchain=toolchain, library="torch")
    return replace(made, library_seconds=3e-6, **changes)


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
start = time.perf_counter()
import tritongemm
tritongemm.mm
took = time.perf_counter() - start
heavy = [m for m in ("triton", "jinja2", "joblib", "yaml", "scipy", "sklearn", "rich") if m in sys.modules]
assert not heavy, heavy
assert took < 0.1, took
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tritongemm.__file__).parents[1])
    code = "import sys, tritongemm; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tritongemm.__file__).parents[1])


# What is said of tensors on a GPU, with tensors that pretend to be there.


@pytest.fixture
def gpu(monkeypatch):
    """(fake tensors of [rows, K] and friends on a GPU, a dispatcher that believes in an sm90 there)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dispatcher = Dispatcher()
    dispatcher._read = True
    kernels: dict[Problem, object] = {}
    dispatcher._devices[0] = SimpleNamespace(arch="sm90", kernels=kernels, index=0)
    with FakeTensorMode():
        yield dispatcher, lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="cuda:0")


def say(dispatcher, *operands, out_dtype=None):
    return str(dispatcher.verdict(*operands, *[None] * (3 - len(operands)), out_dtype))


def test_explains_a_fallback(gpu):
    dispatcher, empty = gpu
    x, w = empty(16, 64), empty(32, 64)
    assert say(dispatcher, x, w) == "fallback: 16x32x64_bf16_TN was never tuned for sm90"
    dispatcher.load([record(problem(16, 32, 64), target="gfx942"), record(problem(8, 32, 64), timer="model")])
    dispatcher._devices[0] = SimpleNamespace(arch="sm90", kernels={}, index=0)
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
    kernel = served.Kernel(won, None, None)
    dispatcher._devices[0] = SimpleNamespace(arch="sm90", kernels={won.problem: kernel}, index=0)
    w = empty(32, 64)
    assert say(dispatcher, empty(4, 4, 64), w) == f"exact: {TILE.name} (2.00 us, 1.50x torch)"
    assert say(dispatcher, empty(1, 2, 64), w) == "library: torch won the tuning of 2x32x64_bf16_TN on sm90"
    dispatcher._devices[0].kernels[won.problem] = "out_of_resources: shared memory 9 > 8 bytes"
    assert say(dispatcher, empty(16, 64), w).endswith("on sm90: out_of_resources: shared memory 9 > 8 bytes")


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
    made = SimpleNamespace(arch="sm90", kernels={}, index=0)
    monkeypatch.setattr("tritongemm.dispatch.Served", lambda index, records: made)
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
    assert len(dispatcher._calls.table) == 1
    sizes = []
    thread = threading.Thread(target=lambda: sizes.append(len(dispatcher._calls.table)))
    thread.start()
    thread.join()
    assert sizes == [0]
    monkeypatch.setattr("tritongemm.dispatch._MOST_CALLS", 4)
    for rows in range(1, 20):
        dispatcher.run(torch.randn(rows, 8), w, None, None)
    assert len(dispatcher._calls.table) <= 4
    dispatcher.load([])
    assert not dispatcher._calls.table


# Launches, compiled for a GPU that is not here.


@pytest.fixture
def no_gpu(monkeypatch):
    """One default stream that captures nothing, also where there is a GPU."""
    stand_ins = {"_stream": lambda index: 0, "_capturing": lambda: False, "_current": lambda: -1}
    for name, value in stand_ins.items():
        monkeypatch.setattr(f"tritongemm.call.{name}", value)


class Device:
    """Stands in for `driver.Device`: memory that only has addresses, tensor maps that name their matrix."""

    api = None

    def __init__(self):
        self.next, self.allocations = 1 << 32, 0

    def make_current(self):
        pass

    def synchronize(self):
        pass

    def memset(self, address, byte, nbytes):
        pass

    def alloc(self, nbytes):
        self.allocations += 1
        self.next += nbytes
        return self.next - nbytes

    def tensor_map(self, address, elem_type, elem_size, shape, stride, box, swizzle):
        return struct.pack("<Q4i", address, *shape, *box).ljust(128, b"m")


class Map:
    """Stands in for `serving.MovingMap`."""

    def __init__(self, api, data):
        self.data = bytearray(data)

    def move(self, address):
        struct.pack_into("<Q", self.data, 0, address)
        return memoryview(self.data)


class Function:
    """Stands in for `driver.Function`: keeps the parameter blocks that were launched."""

    def prepare(self, grid, block, shared, params, cluster, offsets):
        self.params, self.offsets, self.launched = bytearray(params), offsets, []
        return self

    def set_pointer(self, offset, address):
        struct.pack_into("<Q", self.params, offset, address)

    def set_bytes(self, offset, data):
        self.params[offset : offset + len(data)] = data

    def launch(self, stream):
        self.launched.append(bytes(self.params))


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Launches for an H200, compiled here: (records, {problem: launch}, the cache)."""
    cache = Cache(tmp_path_factory.mktemp("cache"))
    records = [
        record(problem(20, 48, 160)),
        record(problem(20, 48, 160, "n"), TMA),
        record(problem(100, 64, 128), PERSISTENT),
        record(problem(8, 16, 16), Config("no_such_template", 16, 16, 16)),
    ]
    return records, served.launches(records, target.load("sm90", compute_units=132), cache), cache


def values(launch: Launch, block: bytes, kind: str) -> list[int]:
    code = {"pointer": "<Q", "i32": "<i", "i64": "<q"}[kind]
    found = zip(launch.params, launch.offsets(), strict=True)
    return [struct.unpack_from(code, block, at)[0] for p, at in found if p.kind == kind]


def aligned(*shape: int) -> torch.Tensor:
    """A bfloat16 tensor whose address is a multiple of 16."""
    count = torch.Size(shape).numel()
    flat = torch.zeros(count + 8, dtype=torch.bfloat16)
    skip = -flat.data_ptr() % 16 // 2
    return flat[skip : skip + count].view(shape)


def called(kernel: served.Kernel, counters: served.Counters | None, shape: tuple[int, int]) -> Call:
    device = Device()
    stand_in = SimpleNamespace(index=-1, place=torch.device("cpu"), device=device, counters=counters)
    return Call(kernel, stand_in, shape, torch.bfloat16)


def test_a_record_becomes_a_launch_with_its_addresses(ready, no_gpu):
    (split, *_), launches, _ = ready
    launch, function = launches[split.problem], Function()
    assert launch.grid == (2 * 2, 2, 1)
    kernel = served.Kernel(split, launch, function)
    assert kernel.bytes("workspace") == 4 * 2 * 32 * 64 and kernel.bytes("semaphore") == 4 * 4
    counters = served.Counters(Device(), kernel.bytes("semaphore"))
    call = called(kernel, counters, (20, 48))
    for _ in range(2):
        x, w = aligned(20, 160), aligned(48, 160)
        out = call(x, w, None, None)
        block = function.launched[-1]
        a, b, c, bias, workspace, semaphore = values(launch, block, "pointer")[:6]
        assert (a, b, c, bias) == (x.data_ptr(), w.data_ptr(), out.data_ptr(), 0)
        assert workspace and semaphore == counters.of_stream(0)
        assert values(launch, block, "i32") == [20, 48, 160, 160, 160, 48]
    assert function.offsets == ()


def test_tensor_maps_follow_their_operands(ready, no_gpu, monkeypatch):
    monkeypatch.setattr(serving, "MovingMap", Map)
    records, launches = ready[0][1:3], ready[1]
    for one, described in zip(records, ("ab", "abc"), strict=True):
        p = one.problem
        launch, function = launches[p], Function()
        call = called(served.Kernel(one, launch, function), None, (p.m, p.n))
        x, w, bias = aligned(p.m, p.k), aligned(p.n, p.k), aligned(p.n) if p.bias == "n" else None
        out = call(x, w, bias, None)
        assert list(function.offsets) == launch.offsets()
        block = function.launched[-1]
        found = {q.value: at for q, at in zip(launch.params, launch.offsets(), strict=True) if q.kind == "tma"}
        where = {"a": x, "b": w, "c": out}
        assert sorted(found) == list(described)
        for name, at in found.items():
            assert struct.unpack_from("<Q2i", block, at) == (where[name].data_ptr(), *where[name].shape)
        if bias is not None:
            assert bias.data_ptr() in values(launch, block, "pointer")


def test_operands_that_do_not_fit_go_to_pytorch(ready, no_gpu):
    (split, *_), launches, _ = ready
    function = Function()
    counters = served.Counters(Device(), 16)
    call = called(served.Kernel(split, launches[split.problem], function), counters, (20, 48))
    x, w = aligned(20, 160).normal_(), aligned(48, 160).normal_()
    strided = aligned(160, 20).normal_().T
    odd = aligned(20 * 160 + 1).normal_()[1:].view(20, 160)
    for left, right in ((strided, w), (odd, w), (x, aligned(160, 48).normal_().T)):
        torch.testing.assert_close(call(left, right, None, None), functional.linear(left, right))
    assert not function.launched


def test_a_bad_record_costs_itself(ready):
    records, launches, cache = ready
    assert "no kernel template is called 'no_such_template'" in launches[records[3].problem]
    again = served.launches(records[:3], target.load("sm90", compute_units=132), cache)
    assert again == {p: value for p, value in launches.items() if not isinstance(value, str)}
    fewer = served.launches(records[2:3], target.load("sm90", compute_units=1), cache)
    assert (launches[records[2].problem].grid, fewer[records[2].problem].grid) == ((2, 1, 1), (1, 1, 1))


def test_what_needs_another_check():
    assert not served.moved(record(problem(1, 2, 3)))
    assert served.moved(record(problem(1, 2, 3), toolchain={"triton": "0.1"}))
    assert served.moved(record(problem(1, 2, 3), toolchain={}))


def test_counters_are_shared_by_nobody(monkeypatch):
    device, capture = Device(), 0
    monkeypatch.setattr(serving, "capture_id", lambda api, stream: capture)
    counters = served.Counters(device, 300)
    assert counters.each == 512
    first, second = counters.of_stream(1), counters.of_stream(2)
    assert first == counters.of_stream(1) != second and abs(first - second) >= 512
    seen = {first, second}
    for capture in (7, 8):  # noqa: B007 (read by the stand-in)
        seen |= {counters.of_capture(1), counters.of_capture(2)}
        assert counters.of_capture(1) in seen
    assert len(seen) == 6 and device.allocations == 1
    while counters._free:
        capture += 1
        counters.of_capture(1)
    capture += 1
    assert counters.of_capture(1) is None and device.allocations == 1
    assert counters.of_stream(3) not in seen and device.allocations == 2


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_the_two_driver_calls(vendor, tmp_path, monkeypatch):
    header = {"nvidia": "#include <cuda.h>", "amd": "#define __HIP_PLATFORM_AMD__\n#include <hip/hip_runtime_api.h>"}
    source = {
        "nvidia": """
#undef cuStreamGetCaptureInfo_v2
CUresult cuStreamGetCaptureInfo_v2(CUstream s, CUstreamCaptureStatus *on, cuuint64_t *id, CUgraph *g,
                                   const CUgraphNode **d, size_t *n) {
  return s == (CUstream)9 ? 901 : (*on = s ? CU_STREAM_CAPTURE_STATUS_ACTIVE : 0, *id = 41, 0);
}
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *at) {
  return (size_t)map % 64 || (size_t)at % 16 ? 1 : (map->opaque[0] = (cuuint64_t)at, 0);
}""",
        "amd": """
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t s, hipStreamCaptureStatus *on, unsigned long long *id,
                                      hipGraph_t *g, const hipGraphNode_t **d, size_t *n) {
  return s == (hipStream_t)9 ? 901 : (*on = s ? hipStreamCaptureStatusActive : 0, *id = 41, 0);
}""",
    }
    (tmp_path / "fake.c").write_text(f"{header[vendor]}\n{source[vendor]}\n")
    include = Path(triton.__file__).parent / "backends" / vendor / "include"
    command = ["cc", "-shared", "-fPIC", f"-I{include}", "fake.c", "-o", "fake.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    library = ctypes.CDLL(str(tmp_path / "fake.so"))
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    api = symbols.Api(vendor, library)
    monkeypatch.setattr(symbols.Api, "error", lambda self, call, code: RuntimeError(f"{call} {code}"))
    assert (serving.capture_id(api, 5), serving.capture_id(api, 0)) == (41, 0)
    with pytest.raises(RuntimeError, match="CaptureInfo_v2 901"):
        serving.capture_id(api, 9)
    if vendor == "amd":
        with pytest.raises(UnavailableError, match="cuTensorMapReplaceAddress"):
            serving.MovingMap(api, bytes(128))
        return
    moving = serving.MovingMap(api, bytes(8) + b"x" * 120)
    assert bytes(moving.move(4096)) == struct.pack("<Q", 4096) + b"x" * 120
    with pytest.raises(RuntimeError, match="ReplaceAddress 1"):
        moving.move(8)


def test_the_module_keeps_one_dispatcher():
    assert isinstance(DISPATCHER, Dispatcher)
    assert torch.equal(linear(torch.ones(1, 2), torch.ones(3, 2), None, None), torch.full((1, 3), 2.0))

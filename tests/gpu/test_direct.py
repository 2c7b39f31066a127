import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.gpu.here import ARCH, DENSE, graph_of, needs_gpu, replayed
from tests.support.nouns import Config, Dispatcher, Patch, Problem, Record, matrices, verify
from tritongemm.backends.blaslt.served_algorithm import WORKSPACE_BYTES, LoadedAlgorithm
from tritongemm.serving import calls

pytestmark = needs_gpu
HERE = (ARCH, ".".join(torch.__version__.split(".")[:2]), torch.version.cuda or "")
known = pytest.mark.skipif(HERE not in WORKSPACE_BYTES, reason=f"{HERE} was never compared; WORKSPACE_BYTES lacks it")

WEIGHTS = [
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)],
    *[(5120, 5120), (11008, 4096), (2560, 6912), (18944, 3584)],
]
ROWS = (1, 2, 3, 4, 7, 16, 33, 64, 100, 192, 256, 777, 1024, 4096)
ODD = [(1, 1, 1), (1, 8, 8), (2, 1, 64), (3, 5, 7), (8, 16, 24), (161, 1642, 267), (234, 466, 1034), (17, 1, 4096)]
ODD += [(1, 3, 5000), (2, 100, 999), (300, 7, 300), (5, 2, 3), (64, 9, 65), (1, 32000, 2048), (128, 64, 13824)]
TINY = [(m, n, k) for m in (1, 2, 5) for n in (1, 2, 5) for k in (1, 2, 5)]
SIZES = [(m, n, k) for m in ROWS for n, k in WEIGHTS] + ODD + TINY
# dtype, and the least share of the calls whose kernels are captured
MODES = {
    "bf16": (torch.bfloat16, 1),
    "fp16": (torch.float16, 1),
    "fp32": (torch.float32, 0.9),
    "tf32": (torch.float32, 1),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: Patch) -> Iterator[None]:
    """A size is frequent at its first call, and float32 is as precise after a test as before it."""
    # PyTorch's module takes assignments only: `monkeypatch` would delete the attribute, and fail
    precision = torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(calls, "FREQUENT_CALLS", 1)
    yield
    torch.backends.cuda.matmul.allow_tf32 = precision


class Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


def launches(call: Callable[[], object]) -> list[tuple[object, ...]]:
    """Kind, kernel, grid, block and shared bytes of all that a call queues, in order."""
    cuda = ctypes.CDLL("libcuda.so.1")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        call()  # loads what it needs
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    handle, count = c_void_p(graph.raw_cuda_graph()), c_size_t()
    assert cuda.cuGraphGetNodes(handle, None, byref(count)) == 0
    nodes = (c_void_p * count.value)()
    found: list[tuple[object, ...]] = []
    assert cuda.cuGraphGetNodes(handle, nodes, byref(count)) == 0
    for node in map(c_void_p, nodes):
        kind, params, name = c_int(), Node(), c_char_p()
        assert cuda.cuGraphNodeGetType(node, byref(kind)) == 0
        if kind.value:  # no kernel: memory set to zero
            found.append((kind.value,))
            continue
        assert cuda.cuGraphKernelNodeGetParams_v2(node, byref(params)) == 0
        code = params.kernel or params.func
        get = cuda.cuKernelGetName if params.kernel else cuda.cuFuncGetName
        assert get(byref(name), c_void_p(code)) == 0
        found.append((0, name.value, tuple(params.grid), tuple(params.block), params.shared))
    return found


def operands(m: int, n: int, k: int, bias: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    return made(m, k), made(n, k), made(n) if bias == "n" else None


@known
@pytest.mark.parametrize("bias", ["none", "n"])
@pytest.mark.parametrize("mode", MODES)
def test_the_launch_is_pytorchs(bias: str, mode: str) -> None:
    dtype, share = MODES[mode]
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    mine, different, captured, asked = Dispatcher(), [], 0, 0
    with torch.inference_mode():
        for m, n, k in SIZES:
            x, w, given = operands(m, n, k, bias, dtype)
            resolution = mine.explain(x, w, given).resolution
            if k == 1 or (n == 1 and (m == 1 or bias == "n")):
                assert resolution.kernel is None
                continue
            assert "called directly" in str(resolution), resolution
            assert isinstance(resolution.kernel, LoadedAlgorithm)
            asked += 1
            captured += resolution.kernel.captured
            theirs = launches(lambda: functional.linear(x, w, given))  # noqa: B023
            ours = launches(lambda: mine.run(x, w, given, None))  # noqa: B023
            bits = torch.equal(mine.run(x, w, given, None), functional.linear(x, w, given))
            if ours != theirs or not bits:
                different.append((m, n, k, ours, theirs, bits))
    assert not different, f"{len(different)} differ, e.g. {different[:3]}"
    assert captured >= share * asked, f"the kernels of {captured} of {asked} calls were captured"


@known
def test_float32_follows_pytorchs_precision() -> None:
    x, w, bias = operands(16, 1280, 8192, "n", torch.float32)
    p = Problem(16, 1280, 8192, *matrices("fp32", layout="TN"))
    mine, tuned = Dispatcher(), Dispatcher()
    tuned.load([Record(p, ARCH, Config("tile", 16, 64, 64), "triton", 1e-6, 0.0, "events", library="torch")])
    results = []
    for allowed in (False, True, False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert tuned.explain(x, w).resolution.kind == ("exact" if allowed else "fallback")
        for given in (None, bias):
            plain = functional.linear(x, w, given)
            assert torch.equal(mine.run(x, w, given, None), plain)
            assert torch.equal(tritongemm.mm(x, w, given), plain)
            assert torch.equal(tuned.run(x, w, given, None), plain) == (given is not None or not allowed)
            results.append(plain)
    assert not torch.equal(results[0], results[2])


@known
@pytest.mark.parametrize("bias", ["none", "n"])
@pytest.mark.parametrize("size", [(1, 4096, 4096), (7, 1280, 8192), (33, 100, 999), (2048, 512, 768)])
def test_it_is_right_and_follows_its_operands(size: tuple[int, int, int], bias: str) -> None:
    m, n, k = size
    p = Problem(m, n, k, *matrices("bf16", layout="TN"), bias=bias)
    given = DENSE.make_inputs(p, "cuda")
    x, w, added, exact = given["a"], given["b"].T.contiguous(), given.get("bias"), DENSE.reference(p, given)
    mine = Dispatcher()
    for scale in (1, 2):
        out = mine.run(x * scale, w.clone(), None if added is None else added * scale, None)
        assert verify.deviation(out, exact * scale) <= DENSE.tolerance(p)
    stacked = mine.run(x.view(1, *x.shape), w, added, None)
    assert stacked.shape == (1, *exact.shape) and torch.equal(stacked[0], functional.linear(x, w, added))
    graph, captured = graph_of(mine.run, x, w, added, None)
    x.mul_(2)
    if added is not None:
        added.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert verify.deviation(captured, exact * 2) <= DENSE.tolerance(p)


@known
def test_a_capture_before_the_first_call_is_pytorchs() -> None:
    x, w, _ = operands(16, 1280, 8192, "none", torch.bfloat16)
    mine = Dispatcher()
    mine.run(x[:2], w, None, None)
    functional.linear(x, w)  # makes the library's handle, which a capture could not
    resolution, out = replayed(lambda: (mine.explain(x, w).resolution, mine.run(x, w, None, None)))
    assert resolution.kernel is None and not resolution.lasting
    assert torch.equal(out, functional.linear(x, w))
    assert mine.explain(x, w).resolution.kernel is not None


@known
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("bias", ["none", "n"])
def test_on_another_device_than_the_current_one(bias: str) -> None:
    mine = Dispatcher()
    for m, n, k in ((16, 1280, 8192), (64, 4096, 4096), (2048, 512, 768)):
        for device in (1, 0, 1):
            x, w, given = operands(m, n, k, bias, torch.bfloat16)
            x, w, given = x.to(device), w.to(device), None if given is None else given.to(device)
            assert mine.explain(x, w, given).resolution.kernel is not None
            out = mine.run(x, w, given, None)
            torch.cuda.synchronize(device)
            assert torch.cuda.current_device() == 0
            assert out.device == x.device and torch.equal(out, functional.linear(x, w, given))


@known
def test_where_pytorch_won_its_kernel_is_ready_after_loading() -> None:
    p = Problem(16, 1280, 8192, *matrices("bf16", layout="TN"))
    x, w, _ = operands(p.m, p.n, p.k, "none", torch.bfloat16)
    mine = Dispatcher()
    mine.load([Record(p, ARCH, Config("tile", 16, 64, 64), "torch", 1e-6, 0.0, "events", library="torch")])
    resolution, out = replayed(lambda: (mine.explain(x, w).resolution, mine.run(x, w, None, None)))
    assert resolution.kind == "library" and resolution.kernel is not None
    assert torch.equal(out, functional.linear(x, w))


@known
@pytest.mark.parametrize("bias", ["none", "n"])
def test_threads_on_streams_of_their_own_do_not_meet(bias: str) -> None:
    mine = Dispatcher()
    sizes = [(16, 1280, 8192), (64, 1280, 8192), (3, 2048, 4096)]  # split over K, with a workspace

    def work(_: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for size in sizes * 10:
                x, w, b = operands(*size, bias, torch.bfloat16)
                assert torch.equal(mine.run(x, w, b, None), functional.linear(x, w, b)), size

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

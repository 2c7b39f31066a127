"""Calls served from compiled code and from Python: the same results, and PyTorch's own where an operand is unusual."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tritongemm
from tests.support import linear_layers
from tests.support.nouns import DriverError, Patch, Support, fails
from tritongemm.core.served_call import LaunchSteps, PatchedLaunch
from tritongemm.hip_ext.driver.module import Function, PreparedLaunch
from tritongemm.hip_ext.driver.symbols import Api
from tritongemm.hip_ext.launching import native_calls
from tritongemm.hip_ext.launching.patched_launch import address_writers
from tritongemm.operations.batched import BATCHED, BatchOperands
from tritongemm.operations.contract import Reading
from tritongemm.operations.dense import DENSE, DenseOperands
from tritongemm.operations.linear_act import LINEAR_ACT
from tritongemm.operations.scaled import SCALED
from tritongemm.operations.scaled_operands import ScaledOperands
from tritongemm.operations.torch_products import linear
from tritongemm.serving import added_operations, products
from tritongemm.serving.calls import CallsByLayout
from tritongemm.serving.dispatcher import Dispatcher, layer_key
from tritongemm.serving.launching import FastCall, OperandCall, prepare_layer
from tritongemm.serving.tuned_calls import TunedCalls, WrittenCalls

M, N, K = 4, 8, 16
BLOCK = 24 + 8  # three addresses and one that nothing writes
Given = Callable[..., Any]


class HostGpu:
    """Stands in for a driver whose one kernel computes bf16 a [M, K] @ b [N, K].T on the host; keeps its launches."""

    def __init__(self) -> None:
        self.status, self.launched = 0, list[tuple[int, ...]]()
        self.api = Api("nvidia", ctypes.CDLL(None))
        self.api.raw["launch_ex"] = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launch)

    def _launch(self, config: int, function: int, by_address: int | None, as_block: int) -> int:
        if self.status:
            return self.status
        words = ctypes.c_uint64 * 4
        if by_address:
            a, b, c = ((ctypes.c_uint64).from_address(at).value for at in words.from_address(by_address)[:3])
        else:
            a, b, c, _ = words.from_address(words.from_address(as_block)[1])
        self.launched.append((a, b, c, ctypes.c_uint32.from_address(config).value, function))
        read = [(ctypes.c_char * (2 * size)).from_address(at) for at, size in ((a, M * K), (b, N * K), (c, M * N))]
        x, w, out = (torch.frombuffer(one, dtype=torch.bfloat16) for one in read)
        out.view(M, N).copy_(x.view(M, K) @ w.view(N, K).T)
        return 0

    def prepare(self, device: Any, by_address: bool = False) -> PatchedLaunch:
        offsets = (0, 8, 16) if by_address else ()
        function = Function(self.api, None, ctypes.c_void_p(77), "kernel")
        shape = (5, 1, 1, 128, 1, 1, 0)
        one = PreparedLaunch(self.api, function, shape, bytes(BLOCK), ((1, 1, 1), False), offsets)
        steps = LaunchSteps([one], {"a": [(0, 0, 0)], "b": [(0, 8, 0)], "c": [(0, 16, 0)]})
        return PatchedLaunch(address_writers(steps), one.launch, steps)

    def bytes(self, buffer: str) -> int:
        return 0


class CountedTable(dict[Any, Any]):
    """Ready calls, and how often Python asked for one."""

    asked = 0

    def get(self, key: Any, otherwise: Any = None) -> Any:
        self.asked += 1
        return super().get(key, otherwise)


@pytest.fixture(params=["compiled", "compiled, asks in Python", "python"])
def path(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[str]:
    module = native_calls.load()
    assert not isinstance(module, Support), module
    name, _, slowly = request.param.partition(", ")
    monkeypatch.setattr(native_calls, "serve", module.serve if name == "compiled" else lambda *_: None)
    if slowly:
        module.use_directly()
    yield name
    native_calls._use_directly(module)


@pytest.fixture
def served(path: str, unloaded: Dispatcher, monkeypatch: Patch) -> Iterator[tuple[Dispatcher, HostGpu]]:
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    yield unloaded, HostGpu()


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def keep(dispatcher: Dispatcher, gpu: Any, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Have the kernel serve calls of these operands' shapes."""
    operands, device = DenseOperands(x, w, bias), linear_layers.stand_in_device()
    reading = DENSE.read(operands)
    assert isinstance(reading, Reading)
    ready = prepare_layer(operands, reading, linear, gpu, device)
    if isinstance(ready, OperandCall):
        (by_layout := CallsByLayout(lambda _: (linear, False)))._calls[x.stride(), w.stride()] = ready
        ready = by_layout
    dispatcher.calls.table[layer_key(x, w, bias, None)] = ready


def check(call: Given, operands: Sequence[Tensor], times: int = 3) -> None:
    for _ in range(times):
        torch.testing.assert_close(call(*operands), functional.linear(*operands), rtol=0.02, atol=0.02)


def test_a_kernel_serves_calls_at_any_address(served: tuple[Dispatcher, HostGpu], path: str) -> None:
    dispatcher, gpu = served
    x, w = random(M, K), random(N, K)
    keep(dispatcher, gpu, x, w)
    moved = [(random(M, K), w), (random(2 * M, K)[M:], random(N, K))]
    for x, w in [(x, w), *moved]:  # noqa: B020
        check(tritongemm.mm, (x, w))
        assert gpu.launched[-1][:2] == (x.data_ptr(), w.data_ptr()) and gpu.launched[-1][3:] == (5, 77)
    assert len(gpu.launched) == 9 and len(dispatcher.calls.compiled) == (path == "compiled")
    dispatcher.calls = type(dispatcher.calls)()  # as when other rows are loaded: nothing is served from before
    check(tritongemm.mm, (x, w))
    assert len(gpu.launched) == 9


def test_parameters_are_given_one_by_one_where_a_kernel_takes_maps(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served
    gpu.prepare = lambda device: HostGpu.prepare(gpu, device, by_address=True)  # type: ignore[method-assign,assignment,misc]
    x, w = random(M, K), random(N, K)
    keep(dispatcher, gpu, x, w)
    check(tritongemm.mm, (x, w))
    assert len(gpu.launched) == 3


def test_a_transposed_view_has_its_matrix_read(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served
    x, b = random(M, K), random(N, K)
    w = torch.empty_strided((N, K), (1, N), dtype=b.dtype).copy_(b)
    keep(dispatcher, gpu, x, w)
    for _ in range(3):
        tritongemm.mm(x, w)
        assert gpu.launched[-1][:2] == (x.data_ptr(), w.data_ptr())
    tritongemm.mm(x, b)  # the same shape, but its rows are dense
    assert len(gpu.launched) == 3


def test_unusual_calls_are_pytorchs(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served
    x, w = random(M, K), random(N, K)
    keep(dispatcher, gpu, x, w)
    with torch.no_grad():
        check(tritongemm.mm, (x, w))
        launches = len(gpu.launched)
        check(tritongemm.mm, (random(M * K + 1)[1:].view(M, K), w))  # not a multiple of 16 bytes
        check(tritongemm.mm, (random(K, M).T, w))
        assert type(tritongemm.mm(x.as_subclass(type("Own", (Tensor,), {})), w)) is not Tensor
        assert torch.func.vmap(lambda one: tritongemm.mm(one, w))(x[None]).shape == (1, M, N)
        with torch.autograd.forward_ad.dual_level():
            check(tritongemm.mm, (x, w))
    assert tritongemm.mm(x, torch.nn.Parameter(w)).grad_fn is not None
    torch.set_autocast_enabled("cuda", True)
    tritongemm.mm(x, w)
    torch.set_autocast_enabled("cuda", False)
    torch.jit.trace(lambda one: tritongemm.mm(one, w), x, check_trace=False)
    fails(TypeError, "w must be a tensor, not int", tritongemm.mm, x, 3)
    fails(TypeError, "bias must be a tensor, not str", tritongemm.mm, x, w, "x")
    fails(TypeError, "offs must be a tensor", tritongemm.grouped_mm, x, w.T[None], None)
    assert len(gpu.launched) == launches
    check(tritongemm.mm, (x, w))
    assert len(gpu.launched) == launches + 3


def test_what_the_driver_refuses_is_raised(served: tuple[Dispatcher, HostGpu], monkeypatch: Patch) -> None:
    dispatcher, gpu = served
    monkeypatch.setattr(Api, "_text", lambda self, function, code: "CUDA_ERROR_ILLEGAL_ADDRESS")
    x, w = random(M, K), random(N, K)
    keep(dispatcher, gpu, x, w)
    check(tritongemm.mm, (x, w))
    gpu.status = 700
    for _ in range(2):
        fails(DriverError, "ILLEGAL_ADDRESS", tritongemm.mm, x, w)


def test_float32_is_served_as_pytorch_is_set(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, _ = served
    x, w = torch.randn(M, K), torch.randn(N, K)
    try:
        for name in ("highest", "high") * 2:
            torch.set_float32_matmul_precision(name)
            dispatcher.calls.table[layer_key(x, w, None, None)] = lambda *_, name=name: name
            assert [tritongemm.mm(x, w) for _ in range(2)] == [name] * 2
    finally:
        torch.set_float32_matmul_precision("highest")


def test_threads_call_at_once(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served

    def work(_: int) -> None:
        w = random(N, K)
        keep(dispatcher, gpu, random(M, K), w)
        for _ in range(50):
            check(tritongemm.mm, (random(M, K), w), 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert len(gpu.launched) == 400


def test_workspaces_are_those_of_the_stream(served: tuple[Dispatcher, HostGpu], path: str) -> None:
    """Until a stream has some, and while a graph is captured, Python serves."""
    dispatcher, gpu = served
    x, w = random(M, K), random(N, K)
    asked = list[int]()

    class Pool:
        of_streams: dict[int, tuple[int, int]] = {}  # noqa: RUF012

        def for_stream(self, stream: int) -> tuple[int, int]:
            asked.append(stream)
            return self.of_streams.setdefault(stream, (0x1000, 0x2000))

    device: Any = linear_layers.stand_in_device()
    device.workspaces = Pool()
    gpu.bytes = lambda buffer: 64  # type: ignore[method-assign]
    dispatcher.calls.table[layer_key(x, w, None, None)] = FastCall(gpu, device, (M, N), torch.bfloat16)
    check(tritongemm.mm, (x, w), 4)
    assert len(gpu.launched) == 4 and len(asked) == (1 if path == "compiled" else 4)


def test_other_operations_write_to_new_memory_or_to_the_given_memory(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served
    device: Any = linear_layers.stand_in_device()
    x, w, ones = random(M, K), random(N, K), torch.ones(1)
    out = torch.empty(1, M, N, dtype=torch.bfloat16)
    given = BatchOperands(x[None], w.mT[None], None, None, None, None, "", out)
    reading: Any = type("Reading", (), {"tensors": {"a": given.a, "b": given.b}, "result": ((1, M, N), torch.bfloat16)})
    of_batch = OperandCall(BATCHED, given, reading, lambda *_: torch.zeros(1), gpu, device)
    scaled = ScaledOperands(x, w, ones, ones)
    tensors = {"a": x, "b": w, "scale_a": ones, "scale_b": ones}
    read: Any = type("Read", (), {"tensors": tensors, "result": ((M, N), torch.bfloat16)})
    of_scaled = OperandCall(SCALED, scaled, read, lambda *_: torch.zeros(1), gpu, device)
    dispatcher.calls.table[products._batch_key(*given)] = of_batch
    dispatcher.calls.table[products._scaled_key(*scaled[:8])] = of_scaled
    for _ in range(3):
        assert tritongemm.bmm(given.a, given.b, out=out) is out
        torch.testing.assert_close(out[0], x @ w.T)
        torch.testing.assert_close(tritongemm.scaled_mm(*scaled[:4]), x @ w.T)
        traced = torch.ops.tritongemm.scaled_mm(*scaled[:6])  # PyTorch leaves out what has its default value
        torch.testing.assert_close(traced, x @ w.T)
    assert len(gpu.launched) == 9


def test_functions_with_a_general_key_are_served_too(served: tuple[Dispatcher, HostGpu]) -> None:
    dispatcher, gpu = served
    x, w = random(M, K), random(N, K)
    given = LINEAR_ACT.operands(x, w, "relu")
    reading: Any = type("Reading", (), {"tensors": {"a": x, "b": w}, "result": ((M, N), torch.bfloat16)})
    ready = OperandCall(
        LINEAR_ACT, given, reading, LINEAR_ACT.make_fallback(given), gpu, linear_layers.stand_in_device()
    )
    dispatcher.calls.table[added_operations.key_of("linear_act", *given)] = ready
    with torch.no_grad():
        check(lambda x, w: tritongemm.linear_act(x, w, "relu"), (x, w))  # the kernel that stands in has no activation
    assert len(gpu.launched) == 3 and tritongemm.linear_act(x, w[1:], "relu").shape == (M, N - 1)
    assert tritongemm.linear_act(x.requires_grad_(), w, "relu").requires_grad and len(gpu.launched) == 3


def test_code_of_inductor_gives_the_memory_of_the_result(served: tuple[Dispatcher, HostGpu], path: str) -> None:
    dispatcher, gpu = served
    calls, device = WrittenCalls(dispatcher, functional.linear), linear_layers.stand_in_device()
    dispatcher.transposed_weights = frozenset({(K, N)})
    x, w, out = random(M, K), random(N, K).t(), random(M, N)
    asked = []
    for ready in (FastCall(gpu, device, (M, N), torch.bfloat16), None):
        dispatcher.calls = type(dispatcher.calls)()
        dispatcher.calls.table = CountedTable({calls._key(x, w, None): ready})
        for _ in range(3):
            assert calls.write(x, w, None, out.zero_()) == (ready is not None)
            torch.testing.assert_close(out, x @ w if ready else torch.zeros_like(out))
        asked.append(dispatcher.calls.table.asked)
        assert not calls.write(random(K, M).t(), w, None, out) and not calls.write(x, w, None, random(N, M).t())
    assert len(gpu.launched) == 3 and max(asked) <= (2 if path == "compiled" else 3)


def test_a_servers_layer_is_served_or_declined(
    served: tuple[Dispatcher, HostGpu], path: str, monkeypatch: Patch
) -> None:
    """What a kernel does not serve is False, and None where Python has to look."""
    dispatcher, gpu = served
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    calls, device = TunedCalls(dispatcher, functional.linear), linear_layers.stand_in_device()
    dispatcher.weights = frozenset({(N, K)})
    x, w = random(M, K), random(N, K)
    both: tuple[Any, ...] = FastCall(gpu, device, (M, N), torch.bfloat16), None
    for ready in both:
        dispatcher.calls = type(dispatcher.calls)()
        dispatcher.calls.table[calls._key(x, w, None)] = ready
        for _ in range(2):
            result = calls.launch(x, w, None)
            if path == "python" or ready is None:
                assert result is (None if path == "python" else False)
            else:
                torch.testing.assert_close(result, x @ w.t())


def test_a_process_without_it_says_why(monkeypatch: Patch) -> None:
    monkeypatch.setenv("TRITONGEMM_NATIVE", "0")
    assert str(native_calls.load.__wrapped__()) == "TRITONGEMM_NATIVE is 0"
    monkeypatch.delenv("TRITONGEMM_NATIVE")
    monkeypatch.setattr("triton.runtime.build.compile_module_from_src", None)
    assert "can't be compiled or loaded: TypeError" in str(native_calls.load.__wrapped__())

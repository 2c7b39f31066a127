import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from tests.gpu.here import VENDOR, needs_gpu, nvidia
from tests.support import FAKES, ROOT
from tests.support.nouns import DriverError, Launch, Param, fails
from tritongemm.hip_ext.binaries import code_object
from tritongemm.hip_ext.driver import driver, tensor_map

pytestmark = needs_gpu
Scaling = tuple[bytes, driver.Function, int]


@triton.jit  # type: ignore[untyped-decorator]
def scale(x, y, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def product(a, b, c, K, stride, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        left, right = tl.load(a + m[:, None] * stride + ks[None, :]), tl.load(b + ks[:, None] * stride + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * stride + n[None, :], total)


@triton.jit  # type: ignore[untyped-decorator]
def copy(marker, source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    target.store([row, column], source.load([row, column]))
    tl.store(marker, 7)


@pytest.fixture(scope="module")
def device() -> driver.Device:
    return driver.open_driver(VENDOR or "").device()


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, int], divisible: Sequence[str] = (), **options: int
) -> tuple[bytes, Any]:
    """(code object, metadata) of a Triton kernel for the present GPU."""
    target = triton.runtime.driver.active.get_current_target()
    known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    signature = types | dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(kernel, signature, constants, known), target=target, options=options)
    return made.asm["cubin" if target.backend == "cuda" else "hsaco"], made.metadata


@pytest.fixture(scope="module")
def scaling(device: driver.Device) -> Scaling:
    code, metadata = compiled(
        scale, {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32"}, {"BLOCK": 1024}, num_warps=4
    )
    return code, device.load(code).function("scale"), int(metadata.num_warps) * device.properties["wave_size"]


def scaling_params(x: torch.Tensor, y: torch.Tensor, factor: float) -> bytes:
    return struct.pack("<QQif", x.data_ptr(), y.data_ptr(), x.numel(), factor) + bytes(16)


def test_device_facts_agree_with_torch(device: driver.Device) -> None:
    reported = torch.cuda.get_device_properties(0)
    facts = device.properties
    assert device.name == reported.name
    assert facts["compute_units"] == reported.multi_processor_count
    assert facts["l2_bytes"] == reported.L2_cache_size
    assert facts["memory_bytes"] == reported.total_memory
    assert facts["wave_size"] == reported.warp_size
    if VENDOR == "nvidia":
        assert device.arch == f"sm{reported.major}{reported.minor}"
        assert facts["lds_bytes"] == reported.shared_memory_per_block_optin
    else:
        assert device.arch == reported.gcnArchName.split(":")[0]
    free, total = device.memory()
    assert 0 < free < total <= facts["memory_bytes"]
    assert facts["clock_khz"] > 100_000 and facts["bus_id"].count(":") == 2
    print(device.name, device.arch, facts, driver.open_driver(VENDOR or "").version())


def test_memory_and_streams(device: driver.Device) -> None:
    stream, address = device.stream(), device.alloc(1 << 20)
    data = bytes(range(256)) * 4096
    interface = {"shape": (1 << 20,), "typestr": "|u1", "data": (address, False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.cuda.synchronize()
    device.memset(address + 256, 0xEE, 256, stream.handle)
    stream.synchronize()
    assert memory.cpu().numpy().tobytes() == data[:256] + b"\xee" * 256 + data[512:]
    device.free(address)
    stream.destroy()
    fails(DriverError, r"OUT_OF_MEMORY|OutOfMemory", device.alloc, 1 << 50)


def test_kernel_on_torch_tensors(device: driver.Device, scaling: Scaling) -> None:
    code, function, threads = scaling
    (read,) = code_object.read(code)
    reported = function.attributes
    print("attributes", reported, "read", read.registers, read.spills, read.shared)
    counted = reported["registers"], reported["local_bytes"], reported["shared_bytes"]
    assert counted == (read.registers, read.spills, read.shared)
    assert code_object.arch(code) == device.arch
    assert read.explicit_bytes == 40
    x = torch.randn(5000, device="cuda")
    y = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    function.launch((5, 1, 1), (threads, 1, 1), 0, scaling_params(x, y, 3.0))
    device.synchronize()
    assert torch.equal(y, x * 3.0)
    offsets = [a.offset for a in read.args] if VENDOR == "nvidia" else []
    function.launch((5, 1, 1), (threads, 1, 1), 0, scaling_params(x, y, 5.0), offsets=offsets)
    device.synchronize()
    assert torch.equal(y, x * 5.0)


def test_product_with_more_shared_memory_than_the_default(device: driver.Device) -> None:
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32", "stride": "i32"}
    sizes, stages = {"M": 128, "N": 128, "BK": 64}, 3 if VENDOR == "nvidia" else 2
    code, metadata = compiled(product, types, sizes, ("a", "b", "c", "K", "stride"), num_warps=4, num_stages=stages)
    (read,) = code_object.read(code)
    assert metadata.shared > 48 * 1024 or VENDOR == "amd"
    function = device.load(code).function(read.symbol)
    reported = function.attributes
    print("product", reported, "read", read, metadata.shared)
    counted = reported["registers"], reported["local_bytes"], reported["shared_bytes"]
    assert counted == (read.registers, read.spills, read.shared)
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.full((512, 512), float("nan"), device="cuda")
    torch.cuda.synchronize()
    params = struct.pack("<QQQii", a.data_ptr(), b.data_ptr(), c.data_ptr(), 512, 512) + bytes(16)
    threads = metadata.num_warps * device.properties["wave_size"]
    function.launch((4, 4, 1), (threads, 1, 1), metadata.shared, params)
    device.synchronize()
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=2e-3, atol=2e-2)


def test_graph_replays_patched_launches(device: driver.Device, scaling: Scaling) -> None:
    _, function, threads = scaling
    x, (y, z) = torch.randn(4096, device="cuda"), torch.zeros(2, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = device.stream()
    prepared = function.prepare((4, 1, 1), (threads, 1, 1), 0, scaling_params(x, y, 2.0))
    device.begin_capture(stream.handle)
    prepared.launch(stream.handle)
    prepared.set_bytes(8, struct.pack("<Q", z.data_ptr()))
    prepared.launch(stream.handle)
    graph = device.end_capture(stream.handle)
    stream.synchronize()
    assert not y.any() and not z.any()
    start, stop = device.event(), device.event()
    start.record(stream.handle)
    for _ in range(10):
        graph.launch(stream.handle)
    stop.record(stream.handle)
    stop.synchronize()
    assert torch.equal(y, x * 2) and torch.equal(z, x * 2)
    assert 0.001 < start.elapsed_ms(stop) < 50
    graph.destroy()
    device.begin_capture(stream.handle)
    with pytest.raises(DriverError, match=r"CAPTURE|Capture"):
        stream.synchronize()  # not allowed while recording, and spoils the recording
    fails(DriverError, r"CAPTURE|Capture", device.end_capture, stream.handle)
    prepared.launch(stream.handle)  # the stream works again
    stream.synchronize()


def test_refusals_have_the_vendors_names(device: driver.Device, scaling: Scaling) -> None:
    _, function, threads = scaling
    x = torch.zeros(16, device="cuda")
    with pytest.raises(DriverError, match=r"INVALID_VALUE|InvalidValue|InvalidConfiguration"):
        function.launch((1, 1, 1), (4096, 1, 1), 0, scaling_params(x, x, 1.0))
    too_much = device.properties["lds_bytes"] + 4096
    with pytest.raises(DriverError) as caught:
        function.launch((1, 1, 1), (threads, 1, 1), too_much, scaling_params(x, x, 1.0))
    print(caught.value)
    fails(DriverError, r"NOT_FOUND|NotFound", device.load(scaling[0]).function, "absent")
    with pytest.raises(DriverError) as caught:
        device.load(b"\x7fELF" + bytes(4096))
    print(caught.value)
    function.launch((1, 1, 1), (threads, 1, 1), 0, scaling_params(x, x, 1.0))
    device.synchronize()


FAULT = """
import sys
sys.path.insert(0, {root!r})
from tritongemm.core.errors import DriverError
from tritongemm.hip_ext.driver import driver
device = driver.open_driver({vendor!r}).device()
function = device.load(open({path!r}, "rb").read()).function("scale")
function.launch((1, 1, 1), ({threads}, 1, 1), 0, {params!r})
try:
    device.synchronize()
except DriverError as error:
    print(error)
"""


@nvidia  # on AMD a fault ends the process
def test_illegal_access_is_named(device: driver.Device, scaling: Scaling, tmp_path: Path) -> None:
    code, _, threads = scaling
    (tmp_path / "k").write_bytes(code)
    params = struct.pack("<QQif", 16, 16, 1024, 1.0) + bytes(16)
    script = FAULT.format(root=str(ROOT), vendor=VENDOR, path=str(tmp_path / "k"), threads=threads, params=params)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access" in done.stdout, done.stderr


@nvidia
def test_clusters_have_the_asked_size(device: driver.Device, tmp_path: Path) -> None:
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    subprocess.run([ptxas, "-arch=sm_90", FAKES / "cluster_ranks.ptx", "-o", tmp_path / "k"], check=True, timeout=60)
    function = device.load((tmp_path / "k").read_bytes()).function("ranks")
    for cluster in (1, 2, 8, 16):
        out = torch.zeros(32, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        function.launch((32, 1, 1), (32, 1, 1), 0, struct.pack("<Q", out.data_ptr()), cluster=cluster)
        device.synchronize()
        assert out.tolist() == [cluster * 100 + block % cluster for block in range(32)]
    with pytest.raises(DriverError) as caught:
        function.launch((33, 1, 1), (32, 1, 1), 0, struct.pack("<Q", 0), cluster=2)
    print(caught.value)


@nvidia
@pytest.mark.parametrize("shape", [(16, 64), (4096, 4096)], ids=["small", "large"])
def test_a_tensor_map_holds_its_address_as_it_is(device: driver.Device, shape: tuple[int, int]) -> None:
    bf16, swizzle = 10, 3
    place = tensor_map.find_address_offset(
        lambda at: device.tensor_map(at, bf16, 2, shape, shape[1], (16, 64), swizzle)
    )
    assert place is not None
    first, second = (device.tensor_map(at << 20, bf16, 2, shape, shape[1], (16, 64), swizzle) for at in (3, 7))
    moved = bytearray(first)
    struct.pack_into("<Q", moved, place, 7 << 20)
    assert bytes(moved) == second != first


@nvidia
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tensor_maps_for_host_descriptors(device: driver.Device, dtype: str) -> None:
    kind = f"tensordesc<{dtype}[16,64]>"
    code, metadata = compiled(
        copy, {"marker": "*i32", "source": kind, "target": kind}, {"ROWS": 16, "COLUMNS": 64}, num_warps=4
    )
    (read,) = code_object.read(code)
    function = device.load(code).function("copy")
    rows, columns, stride = 100, 72, 80  # neither a multiple of the block
    marker = torch.zeros(1, dtype=torch.int32, device="cuda")
    source = torch.randn(rows, stride, device="cuda").to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype]))
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    params, maps = [Param("pointer", "marker")], {}
    for tensor, meta in zip((source, target), metadata.tensordesc_meta, strict=True):
        kinds, tile = (meta["elem_type"], meta["elem_size"]), (tuple(meta["block_size"]), meta["swizzle"])
        maps[len(params)] = device.tensor_map(tensor.data_ptr(), *kinds, (rows, columns), stride, *tile)
        params += [Param("tma"), Param("i32", rows), Param("i32", columns), Param("i64", stride), Param("i64", 1)]
    params += [Param("pointer"), Param("pointer")]
    launch = Launch("", "copy", (7, 2, 1), (128, 1, 1), metadata.shared, tuple(params), ())
    packed = launch.pack({"marker": marker.data_ptr()}, maps)
    print("natural", launch.offsets(), "compiled", [a.offset for a in read.args])
    function.launch(launch.grid, launch.block, launch.shared, packed, offsets=launch.offsets())
    device.synchronize()
    assert marker.item() == 7
    assert torch.equal(target[:, :columns], source[:, :columns])
    assert not target[:, columns:].any()
    # the same through one block, laid out as the compiler says
    target.zero_()
    block = bytearray(read.kernarg_bytes)
    for param, start, natural in zip(params, read.args, launch.offsets(), strict=True):
        block[start.offset : start.offset + param.size] = packed[natural : natural + param.size]
    torch.cuda.synchronize()
    function.launch(launch.grid, launch.block, launch.shared, bytes(block))
    device.synchronize()
    assert torch.equal(target[:, :columns], source[:, :columns])


def test_a_prepared_launch_costs_the_host_little(device: driver.Device, scaling: Scaling) -> None:
    _, function, threads = scaling
    x = torch.zeros(16, device="cuda")
    stream = device.stream()
    prepared = function.prepare((1, 1, 1), (threads, 1, 1), 0, scaling_params(x, x, 1.0))
    best = float("inf")
    for _ in range(30):
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            prepared.set_bytes(0, struct.pack("<Q", x.data_ptr()))
            prepared.launch(stream.handle)
        best = min(best, (time.perf_counter() - begin) / 200)
    print(f"prepared launch: {best * 1e6:.2f} us of host time")
    assert best < 10e-6

"""Tuned kernels made ready without a GPU: compiled for an H200, launched on stand-ins."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TypeAlias, cast

import pytest
import torch
import triton
from torch.nn import functional

from tests.support import FAKES
from tests.support.linear_layers import StandInDriver, problem, record, run_on_cpu, stand_in_device
from tests.support.nouns import ArtifactCache, Config, Launch, Patch, Problem, Record, UnavailableError, load_target
from tests.support.refusals import fails
from tritongemm.build import prepare
from tritongemm.core.errors import WorkspaceError
from tritongemm.core.launch import HostLaunch
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver, stream, symbols, tensor_map
from tritongemm.hip_ext.driver.module import Grid
from tritongemm.hip_ext.launching import loaded_kernels
from tritongemm.hip_ext.launching.workspaces import WorkspacePool
from tritongemm.serving import kernel_loading, source_row
from tritongemm.serving.launching import FastCall
from tritongemm.system import settings

TMA = Config("tma", 64, 64, 64, num_warps=4, num_stages=2)
TWO_PARTS = Config("ws_tma", 64, 48, 64, num_warps=4, num_stages=2)
SWAPPED = Config("ws_tma_swapped", 72, 64, 64, num_warps=4, num_stages=2, options=(("swap_ab", 1),))
PERSISTENT = Config("persistent", 64, 64, 64, num_warps=4, num_stages=2)

Launches: TypeAlias = dict[Problem, Launch | HostLaunch | str]
Ready: TypeAlias = tuple[list[Record], Launches, ArtifactCache]


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> None:
    run_on_cpu(monkeypatch)


class Device(StandInDriver):
    """Also makes tensor maps that name their matrix."""

    def tensor_map(
        self,
        address: int,
        elem_type: int,
        elem_size: int,
        shape: tuple[int, int],
        stride: int,
        box: tuple[int, int],
        swizzle: int,
    ) -> bytes:
        return struct.pack("<Q4i", address, *shape, *box).ljust(128, b"m")


class Map:
    def __init__(self, api: object, data: bytes | memoryview) -> None:
        self.data = bytearray(data)

    def move(self, address: int) -> memoryview:
        struct.pack_into("<Q", self.data, 0, address)
        return memoryview(self.data)


class Function:
    def __init__(self) -> None:
        self.params, self.offsets = bytearray(), tuple[int, ...]()
        self.launched: list[bytes] = []

    def prepare(
        self, grid: Grid, block: Grid, shared: int, params: bytes, cluster: int, offsets: tuple[int, ...], overlap: bool
    ) -> "Function":
        self.params, self.offsets = bytearray(params), offsets
        return self

    def set_bytes(self, offset: int, data: bytes | memoryview) -> None:
        self.params[offset : offset + len(data)] = data

    def launch(self, stream: int) -> None:
        self.launched.append(bytes(self.params))


def find_launch(launches: Launches, one: Problem) -> Launch:
    launch = launches[one]
    assert isinstance(launch, Launch), launch
    return launch


def find_reason(launches: Launches, one: Problem) -> str:
    reason = launches[one]
    assert isinstance(reason, str)
    return reason


def load_kernel(launch: Launch, function: Function) -> loaded_kernels.TunedKernel:
    return loaded_kernels.TunedKernel(launch, cast(driver.Function, function))


def make_pool(device: StandInDriver, workspace_bytes: int, counter_bytes: int) -> WorkspacePool:
    return WorkspacePool(cast(driver.Device, device), workspace_bytes, counter_bytes)


@pytest.fixture(scope="module")
def ready() -> Ready:
    """Launches for an H200, compiled here: (records, {problem: launch}, the cache)."""
    cache = ArtifactCache(settings.cache_folder())
    records = [
        record(problem(20, 48, 160)),
        record(problem(20, 48, 160, "n"), TMA),
        record(problem(100, 64, 128), PERSISTENT),
        record(problem(100, 96, 128), TWO_PARTS),
        record(problem(72, 96, 128), SWAPPED),
        record(problem(8, 16, 16), Config("no_such_template", 16, 16, 16)),
    ]
    return records, prepare.prepare_launches(records, load_target("sm90", compute_units=132), cache), cache


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


def called(kernel: loaded_kernels.TunedKernel, shared: WorkspacePool | None, shape: tuple[int, int]) -> FastCall:
    device = stand_in_device(driver_device=Device())
    device.workspaces = shared
    return FastCall(kernel, device, shape, torch.bfloat16)


def test_a_record_becomes_a_launch_with_its_addresses(ready: Ready, no_gpu: None) -> None:
    (split, *_), launches, _ = ready
    launch, function = find_launch(launches, split.problem), Function()
    assert launch.grid == (2 * 2, 2, 1)
    kernel = load_kernel(launch, function)
    assert kernel.bytes("workspace") == 4 * 2 * 32 * 64 and kernel.bytes("semaphore") == 4 * 4
    shared = make_pool(Device(), kernel.bytes("workspace"), kernel.bytes("semaphore"))
    call = called(kernel, shared, (20, 48))
    for _ in range(2):
        x, w = aligned(20, 160), aligned(48, 160)
        out = call(x, w, None, None)
        block = function.launched[-1]
        a, b, c, bias, workspace, semaphore = values(launch, block, "pointer")[:6]
        assert (a, b, c, bias) == (x.data_ptr(), w.data_ptr(), out.data_ptr(), 0)
        assert (workspace, semaphore) == shared.for_stream(0)
        assert values(launch, block, "i32") == [20, 48, 160, 160, 160, 48, split.config.group_m]
    assert function.offsets == ()


@pytest.mark.parametrize("reported", [True, False])
def test_tensor_maps_follow_their_operands(reported: bool, ready: Ready, no_gpu: None, monkeypatch: Patch) -> None:
    """All maps of an operand, and the pointer that some kernels take beside them."""
    monkeypatch.setattr(tensor_map, "MovingMap", Map)
    if not reported:  # where addresses stand in a map
        monkeypatch.setattr(tensor_map, "find_address_offset", lambda made: None)
    records, launches = ready[0][1:5], ready[1]
    for one, described in zip(records, ("ab", "abc", "abbcc", "aabcc"), strict=True):
        p = one.problem
        launch, function = find_launch(launches, p), Function()
        call = called(load_kernel(launch, function), None, (p.m, p.n))
        x, w, bias = aligned(p.m, p.k), aligned(p.n, p.k), aligned(p.n) if p.bias == "n" else None
        out = call(x, w, bias, None)
        assert list(function.offsets) == launch.offsets()
        block = function.launched[-1]
        found = [(str(q.value), at) for q, at in zip(launch.params, launch.offsets(), strict=True) if q.kind == "tma"]
        where = {"a": x, "b": w, "c": out}
        assert [name for name, _ in found] == list(described)
        for name, at in found:
            assert struct.unpack_from("<Q2i", block, at) == (where[name].data_ptr(), *where[name].shape)
        pointers = [q.value for q in launch.params if q.kind == "pointer"]
        given = dict(zip(pointers, values(launch, block, "pointer"), strict=True))
        assert ("b" in given) == (one.config.template == "tma") and given.get("b", w.data_ptr()) == w.data_ptr()
        if bias is not None:
            assert given["bias"] == bias.data_ptr()


def test_tensor_maps_float32_and_other_checks() -> None:
    assert tensor_map.find_address_offset(lambda at: bytes(16) + struct.pack("<Q", at) + bytes(104)) == 16
    assert tensor_map.find_address_offset(lambda at: struct.pack("<Q", at >> 4) + bytes(120)) is None
    assert tensor_map.find_address_offset(lambda at: struct.pack("<2Q", at, at % 4096) + bytes(112)) is None
    assert not kernel_loading.made_by_other_triton(record(problem(1, 2, 3)))
    assert kernel_loading.made_by_other_triton(record(problem(1, 2, 3), toolchain={"triton": "0.1"}))
    assert kernel_loading.made_by_other_triton(record(problem(1, 2, 3), toolchain={}))
    float32 = problem(1, 2, 3, dtype="fp32")
    assert source_row.rounds_to_tf32(record(float32)) and not source_row.rounds_to_tf32(record(problem(1, 2, 3)))
    assert not source_row.rounds_to_tf32(record(float32, target="gfx950"))  # whose instructions take full float32
    assert source_row.rounds_to_tf32(record(float32, target="gfx950", winner="blaslt"))


def test_operands_that_do_not_fit_go_to_pytorch(ready: Ready, no_gpu: None) -> None:
    (split, *_), launches, _ = ready
    function = Function()
    call = called(load_kernel(find_launch(launches, split.problem), function), make_pool(Device(), 9, 9), (20, 48))
    x, w = aligned(20, 160).normal_(), aligned(48, 160).normal_()
    strided = aligned(160, 20).normal_().T
    odd = aligned(20 * 160 + 1).normal_()[1:].view(20, 160)
    for left, right in ((strided, w), (odd, w), (x, aligned(160, 48).normal_().T)):
        torch.testing.assert_close(call(left, right, None, None), functional.linear(left, right))
    assert not function.launched


def test_bad_records_and_caches_that_can_not_be_written_cost_themselves(ready: Ready, tmp_path: Path) -> None:
    records, launches, cache = ready
    assert "no kernel template is called 'no_such_template'" in find_reason(launches, records[5].problem)
    again = prepare.prepare_launches(records[:5], load_target("sm90", compute_units=132), cache)
    assert again == {p: value for p, value in launches.items() if not isinstance(value, str)}
    fewer = prepare.prepare_launches(records[2:3], load_target("sm90", compute_units=1), cache)
    assert [find_launch(each, records[2].problem).grid for each in (launches, fewer)] == [(2, 1, 1), (1, 1, 1)]
    (tmp_path / "cache").write_text("")
    one = ready[0][0]
    launches = prepare.prepare_launches(
        [one], load_target("sm90", compute_units=132), ArtifactCache(tmp_path / "cache")
    )
    assert "compiled kernels can't be kept in" in find_reason(launches, one.problem)


def test_without_memory_to_share_pytorch_computes(ready: Ready, no_gpu: None) -> None:
    records, launches, _ = ready
    split = records[0]
    device, function = Device(), Function()
    shared = make_pool(device, 9, 9)
    call = called(load_kernel(find_launch(launches, split.problem), function), shared, (20, 48))
    device.full = True
    fails(WorkspaceError, "OUT_OF_MEMORY", shared.for_stream, 0)
    x, w = aligned(20, 160), aligned(48, 160)
    x.fill_(1)
    w.fill_(1)
    assert torch.equal(call(x, w, None, None), functional.linear(x, w)) and not function.launched
    device.full = False
    call(x, w, None, None)
    assert len(function.launched) == 1


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_the_two_driver_calls(vendor: str, tmp_path: Path, monkeypatch: Patch) -> None:
    include = Path(triton.__file__).parent / "backends" / vendor / "include"
    out = tmp_path / "fake.so"
    command = ["cc", "-shared", "-fPIC", f"-D{vendor}", f"-I{include}", str(FAKES / "driver_calls.c"), "-o", str(out)]
    subprocess.run(command, check=True, timeout=60)
    library = ctypes.CDLL(str(out))
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    api = symbols.Api(vendor, library)
    monkeypatch.setattr(symbols.Api, "error", lambda self, call, code: RuntimeError(f"{call} {code}"))
    assert (stream.capture_id(api, 5), stream.capture_id(api, 0)) == (41, 0)
    fails(RuntimeError, "CaptureInfo_v2 901", stream.capture_id, api, 9)
    if vendor == "amd":
        fails(UnavailableError, "cuTensorMapReplaceAddress", tensor_map.MovingMap, api, bytes(128))
        return
    moving = tensor_map.MovingMap(api, bytes(8) + b"x" * 120)
    assert bytes(moving.move(4096)) == struct.pack("<Q", 4096) + b"x" * 120
    fails(RuntimeError, "ReplaceAddress 1", moving.move, 8)

import ctypes
import itertools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from tests.cpu.hip_ext.test_driver import block
from tests.support.linear_layers import StandInDriver
from tests.support.nouns import Buffer, DriverError, Launch, Param, Patch, fails
from tests.support.timers import poke
from tritongemm.hip_ext.driver import driver, graph_capture
from tritongemm.hip_ext.driver.graph_capture import Captured
from tritongemm.hip_ext.driver.module import Function, Grid, PreparedLaunch
from tritongemm.hip_ext.launching import captured_launch, workspaces
from tritongemm.hip_ext.launching.captured_launch import CapturedKernel
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.hip_ext.launching.patched_launch import ZeroedLaunch
from tritongemm.hip_ext.launching.workspaces import WorkspacePool
from tritongemm.measure.operand_sets import OperandSets

Opened: TypeAlias = tuple[ctypes.CDLL, driver.Device, Function]
StartDriver: TypeAlias = Callable[[str], tuple[ctypes.CDLL, driver.Driver]]
CODE = b"co\0de and more"
SHAPE = (4, 1, 1), (128, 1, 1), 64
PARTS = (0, 8, 12)  # offsets of the three parameters of "fill"


@pytest.fixture
def nvidia(stand_in_driver: StartDriver) -> Opened:
    library, opened = stand_in_driver("nvidia")
    device = opened.device()
    return library, device, device.load(CODE).function("fill")


@pytest.mark.parametrize("offsets", [(), PARTS], ids=["block", "parameter by parameter"])
def test_a_call_of_two_kernels_is_repeated_elsewhere(nvidia: Opened, offsets: tuple[int, ...]) -> None:
    library, device, fill = nvidia

    def queue(at: Mapping[str, int], stream: int) -> None:
        fill.launch(*SHAPE, block(at["c"] + 64, 4, 7), stream, offsets=offsets)
        second = fill.prepare(*SHAPE, block(at["workspace"], 2, 9), cluster=2, offsets=offsets, overlap=True)
        second.launch(stream)

    found = captured_launch.capture_launches(device, ("a", "c", "workspace"), queue)
    assert found is not None and [k.address_slots for k in found] == [{"c": ((0, 64),)}, {"workspace": ((0, 0),)}]
    kernels = [k.kernel for k in found if isinstance(k.kernel, Captured)]
    assert [(kernel.cluster, kernel.overlap, kernel.offsets) for kernel in kernels] == [
        ((1, 1, 1), False, offsets),
        ((2, 1, 1), True, offsets),
    ]
    c, workspace = device.alloc(256), device.alloc(256)
    for address in (c, workspace):
        device.memset(address, 0, 256)
    prepared = captured_launch.prepare_captured(device, found)
    assert prepared.setters.keys() == {"c", "workspace"}
    prepared.set_address("a")(1 << 20)
    prepared.set_address("c")(c)
    prepared.set_address("workspace")(workspace)
    prepared.launch(5)
    assert ctypes.string_at(c, 96) == bytes(64) + struct.pack("<4i", *[7] * 4) + bytes(16)
    assert ctypes.string_at(workspace, 12) == struct.pack("<3i", 9, 9, 0)
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value == 5
    assert list((ctypes.c_uint * 7).in_dll(library, "fake_last")) == [4, 1, 1, 128, 1, 1, 64]
    assert ctypes.c_uint.in_dll(library, "fake_cluster").value == 211
    assert ctypes.c_uint.in_dll(library, "fake_overlap").value == 1


def test_memory_set_to_zero_is_part_of_a_call(nvidia: Opened) -> None:
    library, device, fill = nvidia

    def queue(at: Mapping[str, int], stream: int) -> None:
        device.memset(at["workspace"] + 32, 0, 16, stream)
        fill.launch(*SHAPE, block(at["c"], 4, 7), stream)

    found = captured_launch.capture_launches(device, ("c", "workspace"), queue)
    assert found is not None and [k.address_slots for k in found] == [{"workspace": ((0, 32),)}, {"c": ((0, 0),)}]
    c, workspace = device.alloc(256), device.alloc(256)
    device.memset(workspace, 9, 256)
    prepared = captured_launch.prepare_captured(device, found)
    prepared.set_address("c")(c)
    prepared.set_address("workspace")(workspace)
    prepared.launch(6)
    assert ctypes.string_at(workspace, 64) == bytes([9] * 32 + [0] * 16 + [9] * 16)
    assert ctypes.string_at(c, 16) == struct.pack("<4i", *[7] * 4)
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value == 6


@pytest.mark.parametrize("cluster", [(2, 3, 1), (1, 4, 1), (1, 1, 2)])
def test_a_cluster_along_any_axis_is_repeated(nvidia: Opened, cluster: Grid) -> None:
    library, device, fill = nvidia
    shape = (*SHAPE[0], *SHAPE[1], SHAPE[2])

    def queue(at: Mapping[str, int], stream: int) -> None:
        PreparedLaunch(device.api, fill, shape, block(at["c"], 4, 7), (cluster, False), ()).launch(stream)

    found = captured_launch.capture_launches(device, ("c",), queue)
    assert found is not None
    (one,) = found
    assert isinstance(one.kernel, Captured) and one.kernel.cluster == cluster
    prepared = captured_launch.prepare_captured(device, found)
    prepared.set_address("c")(device.alloc(256))
    prepared.launch(1)
    x, y, z = cluster
    assert ctypes.c_uint.in_dll(library, "fake_cluster").value == 100 * x + 10 * y + z
    poke(library, "policy", 2)
    assert captured_launch.capture_launches(device, ("c",), queue) is None


@dataclass
class Queued:
    """What one of the three captures of a call queues, as the table below has it."""

    device: driver.Device
    fill: Function
    at: Mapping[str, int]
    stream: int
    number: int  # of the capture, from 0

    def run(self, params: bytes = b"", shape: tuple[Grid, Grid, int] = SHAPE) -> "Queued":
        self.fill.launch(*shape, params or block(self.at["c"], 4, 7), self.stream)
        return self

    def clear(self, name: str, byte: int = 0) -> "Queued":
        self.device.memset(self.at[name] + 64, byte, 16, self.stream)
        return self

    def twice(self) -> None:
        for _ in range(2):
            self.fill.prepare(*SHAPE, block(self.at["c"], 4, 7), cluster=2).launch(self.stream)


def one_less(number: int) -> Callable[[Queued], object]:
    return lambda q: q.run() if q.number == number else q.run().run(block(q.at["c"], q.number + 1, 7))


# What is queued, and what of the driver is otherwise then: without that it is captured.
TURNED_DOWN: dict[str, tuple[Callable[[Queued], object], dict[str, int]]] = {
    "a size that depends on an address": (lambda q: q.run(block(q.at["c"], q.at["c"] >> 40, 7)), {}),
    "two addresses in one word": (lambda q: q.run(block(q.at["a"] + q.at["c"], 4, 7)), {}),
    "an address rounded down": (lambda q: q.run(block(q.at["c"] // 256 * 256, 4, 7)), {}),
    "a number that counts the calls": (lambda q: q.run(block(q.at["c"], 4, (q.number + 1) // 3)), {}),
    "another shape": (lambda q: q.run(shape=((q.at["c"] >> 40, 1, 1), *SHAPE[1:])), {}),
    "another shape in one capture": (lambda q: q.run(shape=((1 + q.number % 2, 1, 1), *SHAPE[1:])), {}),
    **{f"one kernel less in capture {number}": (one_less(number), {}) for number in range(3)},
    "memory set to another number": (lambda q: q.clear("a", 7).run(), {}),
    "memory set in rows": (lambda q: q.clear("a").run(), {"rows": 2}),
    "memory set before its turn": (lambda q: q.run().clear("c"), {"early": 1}),
    "memory copied": (Queued.twice, {"kind": 1}),
    "clusters elsewhere": (Queued.twice, {"policy": 2}),
    "no chain": (Queued.twice, {"fork": 1}),
    "all programs at once": (Queued.twice, {"together": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED_DOWN)
def test_what_can_not_be_repeated_elsewhere_is_turned_down(nvidia: Opened, name: str) -> None:
    library, device, fill = nvidia
    call, otherwise = TURNED_DOWN[name]

    def captured() -> object:
        numbers = itertools.count()

        def queue(at: Mapping[str, int], stream: int) -> None:
            call(Queued(device, fill, at, stream, next(numbers)))

        return captured_launch.capture_launches(device, ("a", "c"), queue)

    assert not otherwise or captured() is not None
    for one, value in otherwise.items():
        poke(library, one, value)
    assert captured() is None


def test_what_fails_gives_everything_back_and_is_an_error(nvidia: Opened) -> None:
    library, device, _ = nvidia
    before = ctypes.c_int.in_dll(library, "fake_destroyed").value
    with pytest.raises(DriverError):  # nothing was queued
        captured_launch.capture_launches(device, ("c",), lambda at, stream: None)
    assert ctypes.c_int.in_dll(library, "fake_destroyed").value == before + 2
    poke(library, "refuses", 1)
    fails(DriverError, "cuMemsetD8Async", graph_capture.Cleared(16, bytes(8)).prepare(device.api).launch, 0)


def test_a_driver_that_does_not_list_a_graph(stand_in_driver: StartDriver) -> None:
    device = stand_in_driver("amd")[1].device()
    assert not graph_capture.available(device.api)
    assert captured_launch.capture_launches(device, ("c",), lambda at, stream: pytest.fail("called")) is None


def test_a_captured_kernel_says_its_launch_at_other_addresses() -> None:
    kernel = Captured(77, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, bytes(24), ())
    known = CapturedKernel(kernel, {"a": ((0, 0), (16, 128)), "b": ((8, 0),)})
    assert known.at({"a": 1 << 20, "b": 3}) == replace(kernel, params=struct.pack("<3Q", 1 << 20, 3, (1 << 20) + 128))


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        self.calls.append(("fill", address, byte, nbytes, stream))


def test_memory_is_filled_and_a_served_kernel_clears_its_c() -> None:
    device = Recorder()
    launch = ZeroedLaunch(device, (Buffer("c", 96),), lambda stream: device.calls.append(("launch", stream)))
    launch.set_address("c", 0x1000)
    launch(7)
    launch.set_address("c", 0x2000)
    launch(8)
    assert device.calls == [("fill", 0x1000, 0, 96, 7), ("launch", 7), ("fill", 0x2000, 0, 96, 8), ("launch", 8)]
    device = Recorder()
    plain = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (Param("pointer", "c"),), ())
    for one in (plain, Launch(**{**plain.__dict__, "zeroed": (Buffer("c", 32),)})):
        prepared = TunedKernel(one, FunctionStub(device)).prepare(device)  # type: ignore[arg-type]
        prepared.set_address("c")(0x4000)
        prepared.launch(3)
    assert device.calls == [("launch", 0x4000, 3), ("fill", 0x4000, 0, 32, 3), ("launch", 0x4000, 3)]


class FunctionStub:
    """A function and its one prepared launch, whose first word is the address of C."""

    def __init__(self, device: Recorder) -> None:
        self.params, self._device = bytearray(), device

    def prepare(self, *arguments: object, **_: object) -> "FunctionStub":
        (params,) = (bytearray(a) for a in arguments if isinstance(a, bytes))
        self.params = params
        return self

    def launch(self, stream: int) -> None:
        self._device.calls.append(("launch", int.from_bytes(self.params[:8], "little"), stream))


def test_a_measured_launch_clears_the_c_of_its_own_operands() -> None:
    """In each set of operands; a fill may be a dispatch too, so no symbol of one kernel is promised to the clock."""
    device = Recorder()
    sets = SimpleNamespace(device=device)
    launch = Launch("k.co", "k", (1, 1, 1), (64, 1, 1), 0, (Param("pointer", "c"),), (), zeroed=(Buffer("c", 48),))

    def run(stream: int) -> None:
        device.calls.append(("launch", stream))

    for place in (0x1000, 0x2000):
        OperandSets._zeroed(sets, launch, {"c": place}, run)(5)  # type: ignore[arg-type]
    assert device.calls == [("fill", 0x1000, 0, 48, 5), ("launch", 5), ("fill", 0x2000, 0, 48, 5), ("launch", 5)]


class DeviceOfMaps(Recorder):
    """A device whose tensor maps hold the address in their second word."""

    def tensor_map(self, address: int, *_: object) -> bytes:
        return bytes(8) + address.to_bytes(8, "little") + bytes(112)


def test_c_is_reported_as_a_map_and_as_a_pointer() -> None:
    """A kernel may store full tiles by a map, and rows of others by a pointer; a missing bias is not read."""
    described = Param("tma", "c", elem_type=1, elem_size=2, shape=(64, 64), stride=64, box=(64, 64))
    pointers = [Param("pointer", name) for name in ("c", "scale_a", "c", "workspace")]
    launch = Launch("k.co", "k", (1, 1, 1), (128, 1, 1), 0, (described, *pointers), ())
    device = DeviceOfMaps()
    function = FunctionStub(device)
    prepared = TunedKernel(launch, function).prepare(device)  # type: ignore[arg-type]
    prepared.set_address("c")(0x4000)
    prepared.set_address("scale_a")(0x5000)
    words = [int.from_bytes(function.params[at : at + 8], "little") for at in range(0, len(function.params), 8)]
    assert words[1] == 0x4000 and words[16:] == [0x4000, 0x5000, 0, 0]


def test_no_two_streams_or_captures_share_memory(monkeypatch: Patch) -> None:
    device: Any = StandInDriver()
    capture = 0
    monkeypatch.setattr(workspaces, "capture_id", lambda api, stream: capture)
    pool, unknown = WorkspacePool(device, 1000, 300), lambda: None
    assert pool.counter_bytes == 512 and pool.holds(1000, 512) and not pool.holds(1001, 1) and not pool.holds(1, 513)
    first, second = pool.for_stream(1), pool.for_stream(2)
    assert first is pool.for_stream(1) and abs(first[0] - second[0]) >= 1000 and abs(first[1] - second[1]) >= 512
    seen: set[int | None] = {first[1], second[1]}
    for capture in (7, 8):  # noqa: B007 (read by the stand-in)
        seen |= {pool.for_capture(1, unknown), pool.for_capture(2, unknown)}
        assert pool.for_capture(1, unknown) in seen
    assert len(seen) == 6 and len(device.allocated) == 3
    pools, of_pools = (lambda: (0, 1), lambda: (0, 2)), []
    for capture in range(9, 13):
        of_pools.append(pool.for_capture(1, pools[capture % 2]))
        assert pool.for_capture(1, unknown) == of_pools[-1]
    assert of_pools[:2] == of_pools[2:] and len({*seen, *of_pools}) == 8, "graphs of one pool share them"
    while pool._free:
        capture += 1
        pool.for_capture(1, unknown)
    capture += 1
    assert pool.for_capture(1, unknown) is None and len(device.allocated) == 3
    assert pool.for_capture(1, pools[0]) == of_pools[1]
    assert pool.for_stream(3)[1] not in seen and len(device.allocated) == 5


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_counters_start_as_zeros(stand_in_driver: StartDriver, vendor: str) -> None:
    library, opened = stand_in_driver(vendor)
    pool = WorkspacePool(opened.device(), 1000, 300)
    pairs = [pool.for_stream(stream) for stream in range(20)]  # more than are made at once
    assert len({address for pair in pairs for address in pair}) == 40
    assert all(ctypes.string_at(counters, pool.counter_bytes) == bytes(pool.counter_bytes) for _, counters in pairs)
    assert ctypes.c_int.in_dll(library, "fake_mode").value == 0
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value, "not the stream that waits for all others"

"""The driver binding, run against a stand-in that is compiled from both vendors' real headers."""

import ctypes
import faulthandler
import gc
import mmap
import multiprocessing
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.counted_calls import count_calls
from tests.support.nouns import DriverError, TargetError, UnavailableError, fails, raising, refuses
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver

CODE = b"co\0de and more"
Fake = tuple[ctypes.CDLL, driver.Driver]
BOTH = pytest.mark.parametrize("vendor", ["nvidia", "amd"])


@pytest.fixture
def fake(stand_in_driver: Callable[[str], Fake], vendor: str) -> Fake:
    return stand_in_driver(vendor)


def number(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def block(address: int, count: int, value: int) -> bytes:
    return struct.pack("<Qii", address, count, value)


def ints(data: bytes) -> set[int]:
    return set(struct.unpack(f"<{len(data) // 4}i", data))


@BOTH
def test_device_facts(fake: Fake, vendor: str) -> None:
    _, opened = fake
    device = opened.device(1)
    assert (opened.device_count(), device.name) == (2, "Fake One")
    assert device.arch == {"nvidia": "sm90", "amd": "gfx942"}[vendor]
    units, lds, l2, clock, wave, gbps = {
        "nvidia": (132, 232448, 50 << 20, 1980000, 32, 4917),
        "amd": (304, 65536, 4 << 20, 2100000, 64, 2662),
    }[vendor]
    assert device.properties == {
        "compute_units": units, "lds_bytes": lds, "l2_bytes": l2, "clock_khz": clock, "wave_size": wave,
        "max_threads": 1024, "memory_bytes": 1 << 37, "memory_gbps": gbps, "bus_id": "0000:0c:00.0",
    }  # fmt: skip
    assert device.memory() == (1000, 2000)


def _write(address: int) -> None:
    faulthandler.disable()
    ctypes.memset(address, 7, 1)


@BOTH
@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 16) - 8, (1 << 16) + 48])
def test_guarded_memory_ends_where_nothing_is_mapped(fake: Fake, vendor: str, nbytes: int) -> None:
    library, opened = fake
    memory = opened.device(1).guarded_memory(nbytes)
    pages = -(-nbytes // (1 << 16))
    assert [number(library, f"fake_{what}") for what in ("reserved", "created", "mapped")] == [pages + 1, 1, 1]
    end = memory.address + -(-nbytes // 16) * 16
    assert memory.address % 16 == 0 and end % mmap.PAGESIZE == 0
    ctypes.memset(memory.address, 7, nbytes)
    beyond = multiprocessing.get_context("fork").Process(target=_write, args=(end,))
    beyond.start()
    beyond.join()
    assert beyond.exitcode == -signal.SIGSEGV
    described = memory.__cuda_array_interface__
    assert (described["data"], described["shape"]) == ((memory.address, False), (nbytes,))
    del memory
    assert [number(library, f"fake_{what}") for what in ("reserved", "created", "mapped")] == [0, 0, 0]


@BOTH
def test_what_was_reserved_for_guarded_memory_that_is_not_there_is_given_back(fake: Fake, vendor: str) -> None:
    library, opened = fake
    with pytest.raises(
        DriverError, match=r"^(cuMemCreate|hipMemCreate) failed: (CUDA_ERROR|hipError)_?\w+ \(2\): in w"
    ):
        opened.device().guarded_memory(1 << 40)
    assert [number(library, f"fake_{what}") for what in ("reserved", "created", "mapped")] == [0, 0, 0]


@BOTH
@pytest.mark.parametrize("role", ["granularity", "create_memory", "allow_access"])
def test_a_driver_without_a_call_for_guarded_memory_says_which(fake: Fake, vendor: str, role: str) -> None:
    """And keeps nothing, nor complains when the object goes."""
    library, opened = fake
    opened.api.calls[role] = raising(UnavailableError(f"no {role}; a newer driver is needed"))
    fails(UnavailableError, f"^no {role}", opened.device().guarded_memory, 100)
    gc.collect()
    assert [number(library, f"fake_{what}") for what in ("reserved", "created", "mapped")] == [0, 0, 0]


@BOTH
def test_a_thread_may_do_what_captures_of_others_forbid(fake: Fake, vendor: str) -> None:
    library, opened = fake
    device = opened.device()
    with pytest.raises(KeyError), device.relaxed():
        assert number(library, "fake_mode") == 2
        raise KeyError
    assert number(library, "fake_mode") == 0


@BOTH
def test_using_a_device_makes_it_current_for_the_thread(fake: Fake, vendor: str) -> None:
    library, opened = fake
    first, second = opened.device(0), opened.device(1)
    assert number(library, "fake_current") == 1
    first.alloc(16)
    assert number(library, "fake_current") == 0
    second.stream()
    assert number(library, "fake_current") == 1
    fails(TargetError, f"no {vendor} device 2; there are 2", opened.device, 2)


@BOTH
def test_memory_goes_out_and_comes_back(fake: Fake, vendor: str) -> None:
    library, opened = fake
    device = opened.device()
    address = device.alloc(64)
    ctypes.memmove(address, bytes(range(64)), 64)  # the stand-in's memory is the host's
    device.memset(address + 32, 0xAB, 16, stream=0x5555AAAA0001)
    assert ctypes.string_at(address, 64) == bytes(range(32)) + b"\xab" * 16 + bytes(range(48, 64))
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value == 0x5555AAAA0001
    device.free(address)
    with pytest.raises(DriverError, match=r"^(cuMemAlloc_v2|hipMalloc) failed: (CUDA_ERROR|hipError)_?\w+ \(2\): in w"):
        device.alloc(1 << 40)


@BOTH
@pytest.mark.parametrize("offsets", [(), (0, 8, 12)])
def test_launch_passes_shape_parameters_and_stream(fake: Fake, vendor: str, offsets: tuple[int, ...]) -> None:
    library, opened = fake
    device = opened.device()
    function = device.load(CODE).function("fill")
    assert function.attributes == {"max_threads": 256, "shared_bytes": 1024, "local_bytes": 16, "registers": 40}
    address, stream = device.alloc(400), device.stream()
    function.launch((5, 6, 7), (64, 2, 1), 512, block(address, 100, -3), stream.handle, offsets=offsets)
    assert ints(ctypes.string_at(address, 400)) == {-3}
    assert list((ctypes.c_uint * 7).in_dll(library, "fake_last")) == [5, 6, 7, 64, 2, 1, 512]
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value == stream.handle == 0x5555AAAA0001


@BOTH
@pytest.mark.parametrize("offsets", [(), (0, 8, 12)])
def test_prepared_launch_is_patched_in_place_and_cheap(fake: Fake, vendor: str, offsets: tuple[int, ...]) -> None:
    _, opened = fake
    device = opened.device()
    first, second = device.alloc(16), device.alloc(16)
    function = device.load(CODE).function("fill")
    prepared = function.prepare((1, 1, 1), (32, 1, 1), 0, block(first, 4, 1), offsets=offsets)
    prepared.launch()
    prepared.set_bytes(0, struct.pack("<Q", second))
    prepared.set_bytes(12, struct.pack("<i", 2))
    prepared.launch(7)
    assert ints(ctypes.string_at(first, 16)) == {1} and ints(ctypes.string_at(second, 16)) == {2}
    fails(ValueError, "8 bytes at 12 overrun a parameter block of 16", prepared.set_bytes, 12, bytes(8))

    def once() -> None:
        prepared.set_bytes(0, struct.pack("<Q", first))
        prepared.launch(7)

    assert count_calls(once) <= 8


@pytest.mark.parametrize("vendor", ["nvidia"])
def test_shared_memory_limit_is_raised_once_and_only_when_needed(fake: Fake) -> None:
    library, opened = fake
    function = opened.device().load(CODE).function("fill")
    job = block(0, 0, 0)
    function.launch((1, 1, 1), (32, 1, 1), 48 * 1024 - 1024, job)
    assert number(library, "fake_limit") == 0
    for shared in (100_000, 200_000, 150_000):
        function.launch((1, 1, 1), (32, 1, 1), shared, job)
    assert (number(library, "fake_limit"), number(library, "fake_prefer")) == (200_000, 2)
    with pytest.raises(DriverError, match="cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE"):
        function.launch((1, 1, 1), (32, 1, 1), 232448, job)


@pytest.mark.parametrize("vendor", ["nvidia"])
@pytest.mark.parametrize("offsets", [(), (0, 8, 12)])
def test_clusters_go_through_the_extended_launch(fake: Fake, offsets: tuple[int, ...]) -> None:
    library, opened = fake
    device = opened.device()
    address = device.alloc(16)
    function = device.load(CODE).function("fill")
    function.launch((4, 3, 2), (128, 1, 1), 1000, block(address, 4, 9), 5, cluster=2, offsets=offsets)
    assert list((ctypes.c_uint * 7).in_dll(library, "fake_last")) == [4, 3, 2, 128, 1, 1, 1000]
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value == 5
    assert [number(library, f"fake_{n}") for n in ("cluster", "spread", "wide")] == [211, 1, 0]
    function.launch((16, 1, 1), (128, 1, 1), 0, block(address, 4, 9), cluster=16, offsets=offsets)
    assert [number(library, f"fake_{n}") for n in ("cluster", "wide")] == [1611, 1]
    assert ints(ctypes.string_at(address, 16)) == {9}


@pytest.mark.parametrize("vendor", ["nvidia"])
def test_a_kernel_that_waits_itself_may_start_early(fake: Fake) -> None:
    library, opened = fake
    function = opened.device().load(CODE).function("fill")
    job, shape = block(opened.device().alloc(16), 4, 9), ((4, 3, 2), (128, 1, 1), 0)
    for overlap, cluster, said in ((True, 1, [0, 1]), (False, 2, [211, 0]), (True, 2, [211, 1])):
        function.prepare(*shape, job, cluster, overlap=overlap).launch(7)
        assert [number(library, f"fake_{n}") for n in ("cluster", "overlap")] == said


@pytest.mark.parametrize("vendor", ["amd"])
def test_what_amd_does_not_have_is_said(fake: Fake) -> None:
    device = fake[1].device()
    with pytest.raises(UnavailableError, match="fill wants clusters of 2"):
        device.load(CODE).function("fill").launch((2, 1, 1), (64, 1, 1), 0, block(0, 0, 0), cluster=2)
    fails(UnavailableError, "tensor maps need an NVIDIA driver", device.tensor_map, 0, 6, 2, (8, 8), 8, (8, 8), 0)


@BOTH
def test_capture_records_and_the_graph_replays(fake: Fake, vendor: str) -> None:
    _, opened = fake
    device = opened.device()
    stream, address = device.stream(), device.alloc(16)
    function = device.load(CODE).function("fill")
    device.memset(address, 0, 16)
    device.begin_capture(stream.handle)
    function.launch((1, 1, 1), (32, 1, 1), 0, block(address, 2, 4), stream.handle)
    function.launch((1, 1, 1), (32, 1, 1), 0, block(address + 8, 2, 5), stream.handle)
    graph = device.end_capture(stream.handle)
    assert ints(ctypes.string_at(address, 16)) == {0}
    graph.launch(stream.handle)
    assert ints(ctypes.string_at(address, 16)) == {4, 5}
    graph.destroy()
    device.begin_capture(stream.handle)
    fails(DriverError, "EndCapture failed", device.end_capture, stream.handle)


@BOTH
def test_events_time_and_everything_is_given_back_once(fake: Fake, vendor: str) -> None:
    library, opened = fake
    device = opened.device()
    stream, start, stop = device.stream(), device.event(), device.event()
    start.record(stream.handle)
    stop.record(stream.handle)
    stop.synchronize()
    stream.synchronize()
    assert start.elapsed_ms(stop) == 5.0
    module = device.load(CODE)
    for thing in (stream, start, stop):
        thing.destroy()
        thing.destroy()
    module.unload()
    module.unload()
    assert number(library, "fake_destroyed") == 4


@BOTH
def test_code_stays_where_a_profiler_needs_it(fake: Fake, vendor: str) -> None:
    library, opened = fake
    module = opened.device().load(CODE)
    opened.api.keeps_code = True
    module.unload()
    assert number(library, "fake_destroyed") == 0
    opened.api.keeps_code = False
    module.unload()
    assert number(library, "fake_destroyed") == 1


@BOTH
def test_refusals_carry_call_code_name_and_text(fake: Fake, vendor: str) -> None:
    library, opened = fake
    device = opened.device()
    fails(DriverError, "ModuleLoadData failed", device.load, b"not a code object")
    function = device.load(CODE).function("fill")
    with pytest.raises(DriverError, match="in words") as caught:
        function.launch((1, 1, 1), (2048, 1, 1), 0, block(0, 0, 0))
    call, name = {
        "nvidia": ("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE"),
        "amd": ("hipModuleLaunchKernel", "hipErrorInvalidValue"),
    }[vendor]
    assert (caught.value.call, caught.value.code, caught.value.name) == (call, 1, name)
    with pytest.raises(DriverError, match=r"ModuleGetFunction failed: (CUDA_ERROR_NOT_FOUND|hipErrorNotFound)"):
        device.load(CODE).function("absent")
    ctypes.c_int.in_dll(library, "fake_broken").value = 700
    fails(DriverError, r"Synchronize failed.*700", device.synchronize)


@pytest.mark.parametrize("vendor", ["nvidia"])
def test_tensor_map_is_encoded_as_the_driver_wants_it(fake: Fake) -> None:
    library, opened = fake
    device = opened.device()
    ctypes.c_int.in_dll(library, "fake_version").value = 13020
    elem_type, elem_size = 10, 2  # bfloat16 as the compiler counts

    def facts(*args: Any) -> tuple[int, ...]:
        return struct.unpack("<16Q", device.tensor_map(*args))

    # aligned, kept flag, host type 9, rank 2, address, columns, rows, bytes between rows, box columns, box rows, steps
    expected = (0, 1 << 21, 9, 2, 0x7F0000000010, 300, 1000, 2 * 304, 64, 128, 1, 1, 0, 3, 2, 0)
    assert facts(0x7F0000000010, elem_type, elem_size, (1000, 300), 304, (128, 64), 3) == expected
    assert facts(0, 0, 1, (4, 32), 32, (4, 32), 0)[5:] == (32, 4, 32, 32, 4, 1, 1, 0, 0, 2, 0)
    ctypes.c_int.in_dll(library, "fake_version").value = 13000
    assert facts(16, 6, 2, (1000, 300), 304, (128, 64), 3)[1] == 1 << 21
    assert facts(16, 6, 2, (100, 300), 304, (128, 64), 3)[1] == 0  # under 128 KiB an old driver's flag goes
    refuses("multiples of 16 bytes, not 0x8 and 304 x 2", facts, 8, 6, 2, (100, 300), 304, (128, 64), 3)
    fails(DriverError, "cuTensorMapEncodeTiled failed", facts, 16, 6, 2, (100, 300), 304, (128, 512), 3)


@BOTH
def test_a_driver_without_devices_or_calls_says_so(fake: Fake, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = fake
    ctypes.c_int.in_dll(library, "fake_devices").value = 0
    fails(UnavailableError, r"finds no usable GPU: (cuInit|hipInit) failed", driver.open_driver.__wrapped__, vendor)
    empty = ctypes.CDLL(None)
    monkeypatch.setattr(libraries, "load", lambda *_: empty)
    with pytest.raises(UnavailableError, match=r"has no (cuInit|hipInit); a newer driver is needed"):
        driver.open_driver.__wrapped__(vendor)

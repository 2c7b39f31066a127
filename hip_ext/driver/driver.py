"""Binds the CUDA driver and HIP alike: devices, memory, code, launches, streams, events and graphs.

Two symbol tables (`symbols`), one code. Importing it needs neither library nor GPU; `open_driver` says what is missing.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p
from functools import cache, cached_property
from typing import Any

from tritongemm.core.errors import DriverError, TargetError, UnavailableError
from tritongemm.core.integers import round_up
from tritongemm.hip_ext.driver import symbols
from tritongemm.hip_ext.driver.module import Function, Grid, Module, PreparedLaunch
from tritongemm.hip_ext.driver.stream import Event, Graph, Stream
from tritongemm.hip_ext.driver.symbols import Api
from tritongemm.hip_ext.driver.tensor_map import TensorMapLayout

ALIGNMENT_BYTES = 16  # of the first byte; what kernels load at once is no longer
# The same numbers in both drivers.
_PINNED, _ON_DEVICE, _READ_WRITE, _LEAST_GRANULARITY = 1, 1, 3, 0


class _Properties(ctypes.Structure):
    """CUmemAllocationProp and hipMemAllocationProp."""

    _fields_ = (
        ("kind", c_int),
        ("handles", c_int),
        ("place", c_int),
        ("device", c_int),
        ("security", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc and hipMemAccessDesc."""

    _fields_ = (("place", c_int), ("device", c_int), ("flags", c_int))


class GuardedMemory:
    """Memory of one device whose last byte, up to the next multiple of 16 bytes, is the last one that is mapped there.

    It is given back when this object goes, which its owner must delay until the device has done with it. A DriverError
    is raised without memory, or where the device maps none by pages, an UnavailableError by an old driver.
    """

    def __init__(self, api: Api, device: int, nbytes: int) -> None:
        self.nbytes = nbytes
        base, handle, page = c_ulonglong(), c_ulonglong(), c_size_t()
        properties = _Properties(kind=_PINNED, place=_ON_DEVICE, device=device)
        access = _Access(place=_ON_DEVICE, device=device, flags=_READ_WRITE)
        calls = api.calls
        calls["granularity"](byref(page), byref(properties), _LEAST_GRANULARITY)
        mapped = round_up(nbytes, page.value)
        reserved = mapped + page.value  # the page behind it stays empty
        with ExitStack() as undo:
            calls["reserve"](byref(base), reserved, 0, 0, 0)
            undo.callback(calls["unreserve"], base, reserved)
            calls["create_memory"](byref(handle), mapped, byref(properties), 0)
            undo.callback(calls["release_memory"], handle)
            calls["map_memory"](base, mapped, 0, handle, 0)
            undo.callback(calls["unmap_memory"], base, mapped)
            calls["allow_access"](base, mapped, byref(access), 1)
            weakref.finalize(self, _give_back, undo.pop_all()).atexit = False
        self.address = base.value + mapped - round_up(nbytes, ALIGNMENT_BYTES)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What PyTorch makes a tensor of bytes from, which keeps hold of this object."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _give_back(undo: ExitStack) -> None:
    with suppress(DriverError):  # a device that was lost takes nothing back
        undo.close()


__all__ = [
    "Device", "Driver", "Event", "Function", "Graph", "Grid", "Module", "PreparedLaunch", "Stream", "find_vendor",
    "open_driver",
]  # fmt: skip

VENDORS = ("nvidia", "amd")
MOST_TENSOR_MAPS = 4096  # that a device keeps, 128 bytes each


@cache
def open_driver(vendor: str) -> Driver:
    """Return the driver of ``nvidia`` or ``amd``; an UnavailableError where it or a device is missing."""
    api = symbols.bind(vendor)
    try:
        api.calls["init"](0)
    except DriverError as error:
        raise UnavailableError(f"{api.library._name} was loaded, but finds no usable GPU: {error}") from None
    return Driver(api)


def find_vendor() -> str | None:
    """Return the vendor whose driver is here with at least one device; None on a machine without a GPU."""
    for vendor in VENDORS:
        try:
            if open_driver(vendor).device_count():
                return vendor
        except (UnavailableError, DriverError):
            continue
    return None


class Driver:
    """A started driver; `open_driver` creates it."""

    def __init__(self, api: Api) -> None:
        self.api, self.vendor = api, api.vendor
        self._devices: dict[int, Device] = {}

    def device_count(self) -> int:
        """Return the number of devices that this process may use."""
        count = c_int()
        self.api.calls["device_count"](byref(count))
        return count.value

    def device(self, index: int = 0) -> Device:
        """Return the device of an ordinal, made current for the calling thread."""
        if not 0 <= index < self.device_count():
            raise TargetError(f"no {self.vendor} device {index}; there are {self.device_count()}")
        if index not in self._devices:
            self._devices[index] = Device(self.api, index)
        self._devices[index].make_current()
        return self._devices[index]

    def version(self) -> int:
        """Return the driver's own version number: 13000 is CUDA 13.0, 60443484 is HIP 6.4."""
        version = c_int()
        self.api.calls["driver_version"](byref(version))
        return version.value


class Device:
    """One GPU. Its primary context is kept, so addresses of PyTorch tensors are valid here.

    What is made or allocated through it is made on it, whichever device the thread used before.
    """

    def __init__(self, api: Api, index: int) -> None:
        self.api, self.index = api, index
        self._ordinal, self._context = c_int(), c_void_p()
        self._tensor_maps: dict[tuple[TensorMapLayout, int], bytes] = {}
        api.calls["device_get"](byref(self._ordinal), index)
        if api.vendor == "nvidia":
            api.calls["context_retain"](byref(self._context), self._ordinal)

    @cached_property
    def name(self) -> str:
        """The product's name, e.g. ``NVIDIA H200``."""
        text = ctypes.create_string_buffer(256)
        self.api.calls["device_name"](text, len(text), self._ordinal)
        return text.value.decode()

    @cached_property
    def arch(self) -> str:
        """The architecture, ``sm90`` or ``gfx942``, without feature flags."""
        if self.api.vendor == "nvidia":
            return f"sm{self._attribute('major')}{self._attribute('minor')}"
        # the real struct has the documented size; the spare bytes are for a runtime newer than this file
        properties = ctypes.create_string_buffer(4 * symbols.HIP_PROPERTIES_BYTES)
        self.api.calls["device_properties"](properties, self._ordinal)
        field = properties.raw[symbols.HIP_ARCH_OFFSET : symbols.HIP_ARCH_OFFSET + symbols.HIP_ARCH_BYTES]
        return field.split(b"\0")[0].decode().split(":")[0]

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The device's properties as the driver states them, by name.

        Returns:
            ``compute_units``, ``lds_bytes`` (the most shared memory that a block may opt in to), ``l2_bytes`` (AMD's
            drivers leave out the Infinity Cache behind it; the `Target` has it), ``memory_bytes``, ``clock_khz``,
            ``wave_size``, ``max_threads`` (of a block), ``memory_gbps`` (two transfers a clock of the memory, 0 where
            the driver does not say) and ``bus_id`` (PCI).
        """
        names = ("compute_units", "lds_bytes", "l2_bytes", "clock_khz", "wave_size", "max_threads")
        facts: dict[str, Any] = {name: self._attribute(name) for name in names}
        total, bus_id = c_size_t(), ctypes.create_string_buffer(32)
        self.api.calls["device_memory"](byref(total), self._ordinal)
        self.api.calls["device_bus_id"](bus_id, len(bus_id), self._ordinal)
        facts |= {"memory_bytes": total.value, "memory_gbps": 0, "bus_id": bus_id.value.decode()}
        with suppress(DriverError):
            facts["memory_gbps"] = round(2 * self._attribute("memory_khz") * self._attribute("memory_bits") / 8e6)
        return facts

    def make_current(self) -> None:
        """Make this the calling thread's device."""
        if self.api.vendor == "nvidia":
            self.api.calls["context_set"](self._context)
        else:
            self.api.calls["device_set"](self._ordinal)

    def synchronize(self) -> None:
        """Wait for everything that is queued on the device. Raises DriverError: a kernel failed since the last wait."""
        self.make_current()
        self.api.calls["synchronize"]()

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""
        self.make_current()
        free, total = c_size_t(), c_size_t()
        self.api.calls["memory_info"](byref(free), byref(total))
        return free.value, total.value

    def alloc(self, nbytes: int) -> int:
        """Allocate memory, and return its address, a multiple of 256 bytes."""
        self.make_current()
        address = c_void_p()
        self.api.calls["alloc"](byref(address), nbytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free the memory at an address that `alloc` returned."""
        self.make_current()
        self.api.calls["free"](address)

    def guarded_memory(self, nbytes: int) -> GuardedMemory:
        """Allocate memory with nothing mapped behind its end; the first access beyond it loses the device."""
        self.make_current()
        return GuardedMemory(self.api, self._ordinal.value, nbytes)

    def memset(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        """Fill memory with one byte value, in order on the stream with this handle."""
        self.api.calls["memset"](address, byte, nbytes, stream)

    def load(self, code: bytes) -> Module:
        """Load a code object (cubin, hsaco)."""
        self.make_current()
        return Module(self.api, code)

    def stream(self) -> Stream:
        """Create a stream."""
        self.make_current()
        return Stream(self.api)

    def event(self) -> Event:
        """Create an event."""
        self.make_current()
        return Event(self.api)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread load code and allocate memory while other threads capture, which is forbidden otherwise."""
        mode = c_int(symbols.CAPTURE_RELAXED)
        self.api.calls["capture_mode"](byref(mode))  # an exchange: what it was comes back
        try:
            yield
        finally:
            self.api.calls["capture_mode"](byref(mode))

    def begin_capture(self, stream: int) -> None:
        """Record what this thread queues on `stream` instead of running it."""
        self.api.calls["capture_begin"](stream, symbols.CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> Graph:
        """Stop recording what is queued on `stream`, and make a graph of it."""
        graph = c_void_p()
        self.api.calls["capture_end"](stream, byref(graph))
        return Graph(self.api, graph)

    def tensor_map(
        self,
        address: int,
        elem_type: int,
        elem_size: int,
        shape: tuple[int, int],
        row_stride: int,
        box: tuple[int, int],
        swizzle: int,
    ) -> bytes:
        """Return the 128 bytes of a tensor map; see `tensor_map.TensorMapLayout`."""
        # Candidates of one size have few blocks, and a search asks for each of them hundreds of times.
        key = TensorMapLayout(elem_type, elem_size, shape, row_stride, box, swizzle), address
        if key not in self._tensor_maps:
            self.make_current()
            if len(self._tensor_maps) >= MOST_TENSOR_MAPS:
                self._tensor_maps.clear()
            self._tensor_maps[key] = key[0].encode(self.api, address)
        return self._tensor_maps[key]

    def _attribute(self, name: str) -> int:
        value = c_int()
        self.api.calls["device_attribute"](byref(value), self.api.attributes[name], self._ordinal)
        return value.value

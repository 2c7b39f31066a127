"""Reads kernel times from CUPTI activity records, in process, on NVIDIA.

Once code has been unloaded, CUPTI gives kernels that are loaded later its kernels' names, even if disabled then
(seen with CUDA 13 on an H200: 38 of 40; none where all code stayed). So from its registration on nothing is unloaded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.profilers import trace

_OLDEST = 13  # CUDA 11
# CUpti_ActivityKind: a library's operation may fill or copy memory beside its kernels
_MEMCPY, _MEMSET, _KERNEL = 1, 2, 10
_FORCED = 1
_END_OF_BUFFER = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED
_BUFFER_BYTES = 1 << 20

# The part of CUpti_ActivityKernel that every version from 3 to 10 lays out alike; later ones append.
_KIND, _SPAN, _CORRELATION, _NAME, _PREFIX_BYTES = 0, 16, 92, 104, 112
# CUpti_ActivityMemcpy and CUpti_ActivityMemset have kind and span at the same places, and no name.
_MEMORY_CORRELATION, _MEMORY_BYTES = 44, 48
_MEMORY_NAMES = {_MEMCPY: "memcpy", _MEMSET: "memset"}

_PLACES = (
    "nvidia/cu13/lib",
    "nvidia/cuda_cupti/lib",
    "triton/backends/nvidia/lib/cupti",
    "triton/backends/nvidia/lib/cupti-blackwell",
)
_TOOLKIT = Path("/usr/local/cuda")

_Request = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_Complete = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)

_CALLS: dict[str, tuple[Any, ...]] = {
    "cuptiGetVersion": (c_void_p,),
    "cuptiGetTimestamp": (c_void_p,),
    "cuptiActivityRegisterCallbacks": (_Request, _Complete),
    "cuptiActivityEnable": (c_int,),
    "cuptiActivityDisable": (c_int,),
    "cuptiActivityFlushAll": (c_uint32,),
    "cuptiActivityGetNumDroppedRecords": (c_void_p, c_uint32, c_void_p),
}


class CuptiTrace(trace.KernelTrace):
    """Times every kernel, memcpy and memset within the block; `wait` waits for the device, by default the current."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        super().__init__(open_tracer(), wait or driver.open_driver("nvidia").api.calls["synchronize"])


@cache
def open_tracer() -> CuptiTracer:
    """Return CUPTI, registered once for the process; code loaded from then on stays."""
    api = driver.open_driver("nvidia").api
    toolkit = [_TOOLKIT / "lib64", _TOOLKIT / "extras/CUPTI/lib64"]
    names = ("libcupti.so.13", "libcupti.so.12", "libcupti.so.11.8", "libcupti.so")
    places = libraries.wheel_folders(*_PLACES[:2]), toolkit, libraries.wheel_folders(*_PLACES[2:])
    library = libraries.load("CUPTI", names, [folder for place in places for folder in place])
    try:
        tracer = CuptiTracer(library)
    except DriverError as error:
        raise UnavailableError(f"CUPTI ({library._name}) can't be used here: {error}") from None
    api.keeps_code = True
    return tracer


class CuptiTracer:
    """The registered library; `open_tracer` makes the one of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._walk = library.cuptiActivityGetNextRecord
        self._walk.argtypes = (c_void_p, c_size_t, POINTER(c_void_p))
        version = c_uint32()
        self._call("cuptiGetVersion", byref(version))
        if version.value < _OLDEST:
            raise UnavailableError(
                f"CUPTI {library._name} speaks version {version.value}; {_OLDEST} is the oldest read"
            )
        self._buffers: dict[int, ctypes.Array[c_uint64]] = {}
        self._collection: trace.Collection | None = None
        self._running = self._enabled = False
        # ctypes must not forget what CUPTI goes on calling
        self._callbacks = _Request(self._request), _Complete(self._complete)
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def start(self) -> trace.Collection:
        """Begin a trace; see `trace.KernelTracer`."""
        if self._running:
            raise trace.TraceError("kernel trace: another one is open in this process")
        self._collection = None
        self.flush()
        self._collection = trace.Collection(self._now())
        self.enable()
        self._running = True
        return self._collection

    def stop(self) -> None:
        """End the trace, if one is open; CUPTI goes on watching."""
        if self._running and self._collection is not None:
            self._collection.close(self._now())
        self._running = False

    def enable(self) -> None:
        """Begin to watch, until `disable`; the first launches after it are slow, so traces do not disable it."""
        if not self._enabled:
            for kind in (_KERNEL, *_MEMORY_NAMES):
                self._call("cuptiActivityEnable", kind)
            self._enabled = True  # not before: what was refused once is refused again

    def disable(self) -> None:
        """Stop watching; launches then cost what they cost without a profiler."""
        if self._enabled:
            self._enabled = False
            for kind in (_KERNEL, *_MEMORY_NAMES):
                self._call("cuptiActivityDisable", kind)

    def flush(self) -> None:
        """Have CUPTI deliver the records that it holds."""
        self._call("cuptiActivityFlushAll", _FORCED)

    def _now(self) -> int:
        now = c_uint64()
        self._call("cuptiGetTimestamp", byref(now))
        return now.value

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name)
        function.argtypes = _CALLS[name]
        status = function(*arguments)
        if status:
            text = c_char_p()
            self._library.cuptiGetResultString(status, byref(text))
            raise DriverError(name, status, (text.value or b"unknown error").decode())

    def _request(self, buffer: Any, size: Any, most: Any) -> None:
        memory = (c_uint64 * (_BUFFER_BYTES // 8))()
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], most[0] = address, _BUFFER_BYTES, 0

    def _complete(self, context: int | None, stream: int, buffer: int, _: int, valid: int) -> None:
        memory = self._buffers.pop(buffer, None)
        collection = self._collection
        if memory is None or collection is None:
            return
        try:
            self._read(collection, buffer, valid)
            dropped = c_size_t()
            self._call("cuptiActivityGetNumDroppedRecords", context, stream, byref(dropped))
            if dropped.value:
                collection.fail(f"CUPTI dropped {dropped.value} records")
        except Exception as error:  # nothing may escape into the library's thread
            collection.fail(f"reading CUPTI's buffer failed: {error!r}")

    def _read(self, collection: trace.Collection, buffer: int, valid: int) -> None:
        record = c_void_p()
        while (status := self._walk(buffer, valid, byref(record))) == 0:
            address = record.value or 0
            kind = c_uint32.from_address(address + _KIND).value
            if kind in _MEMORY_NAMES:
                data, at, text = ctypes.string_at(address, _MEMORY_BYTES), _MEMORY_CORRELATION, _MEMORY_NAMES[kind]
            elif kind == _KERNEL:
                data, at = ctypes.string_at(address, _PREFIX_BYTES), _CORRELATION
                (name,) = struct.unpack_from("<Q", data, _NAME)
                text = ctypes.string_at(name).decode(errors="replace") if name else ""
            else:
                continue
            start, end = struct.unpack_from("<QQ", data, _SPAN)
            (correlation,) = struct.unpack_from("<I", data, at)
            # kernels of one graph launch share its correlation id
            collection.add((correlation, start), trace.KernelRecord(text, start, end))
        if status != _END_OF_BUFFER:
            collection.fail(f"CUPTI's buffer ended with status {status}")

"""Reads kernel times from rocprofiler-sdk, in process, on AMD.

The SDK registers tools before the first HIP or HSA call and never later: a process that wants traces calls
`configure` right after its imports. Layouts are those of the SDK's headers 0.5 and 1.2; 0.x and 1.x differ.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver, symbols
from tritongemm.hip_ext.profilers import trace

_CODE_OBJECT, _KERNEL_DISPATCH = 10, 11  # tracing kinds
_KERNEL_SYMBOL, _LOAD = 2, 1  # operation, phase
_TRACING, _LOSSLESS = 1, 2  # buffer category and policy
_BUFFER_BYTES = 4 << 20

# rocprofiler_buffer_tracing_kernel_dispatch_record_t, as far as it is read
_SPAN, _IDS, _RECORD_BYTES = 40, 80, 96  # start and end; kernel_id and dispatch_id
# rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t, likewise
_SYMBOL_ID, _SYMBOL_NAME, _SYMBOL_BYTES = 8, 24, 32


@dataclass(frozen=True)
class StructLayout:
    """Where the structs of one major version differ."""

    client_name: int  # offset of the name in rocprofiler_client_id_t
    kind: int  # offset of kind, operation and phase in rocprofiler_callback_tracing_record_t
    payload: int  # offset of its payload


LAYOUTS = {0: StructLayout(client_name=0, kind=32, payload=48), 1: StructLayout(client_name=8, kind=40, payload=56)}


class ConfigurationLockedError(UnavailableError):
    """The SDK registers no more tools: the GPU was used before, or another profiler is attached."""


class _CallbackRecord(ctypes.Structure):
    # passed by value on the stack; the older, shorter one reads just as well through the longer
    _fields_ = [("data", c_uint64 * 8)]


class _ConfigureResult(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("initialize", c_void_p), ("finalize", c_void_p), ("data", c_void_p)]


_Configure = CFUNCTYPE(c_void_p, c_uint32, c_char_p, c_uint32, c_void_p)
_Initialize = CFUNCTYPE(c_int, c_void_p, c_void_p)
_OnCodeObject = CFUNCTYPE(None, _CallbackRecord, c_void_p, c_void_p)
_OnBuffer = CFUNCTYPE(None, c_uint64, c_uint64, POINTER(c_void_p), c_size_t, c_void_p, c_uint64)

_CALLS: dict[str, tuple[Any, ...]] = {
    "get_version": (c_void_p, c_void_p, c_void_p),
    "get_timestamp": (c_void_p,),
    "is_initialized": (c_void_p,),
    "force_configure": (_Configure,),
    "create_context": (c_void_p,),
    "start_context": (c_uint64,),
    "stop_context": (c_uint64,),
    "context_is_valid": (c_uint64, c_void_p),
    "create_buffer": (c_uint64, c_size_t, c_size_t, c_int, _OnBuffer, c_void_p, c_void_p),
    "flush_buffer": (c_uint64,),
    "configure_callback_tracing_service": (c_uint64, c_int, c_void_p, c_size_t, _OnCodeObject, c_void_p),
    "configure_buffer_tracing_service": (c_uint64, c_int, c_void_p, c_size_t, c_uint64),
}


class RocprofilerTrace(trace.KernelTrace):
    """Times every kernel launched within the block; `wait` waits for the device, by default the current one."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        super().__init__(configure(), wait or driver.open_driver("amd").api.calls["synchronize"])


@cache
def configure() -> RocprofilerTracer:
    """Register with the SDK; call it after the imports and before the first use of the GPU.

    A ConfigurationLockedError says that it is too late; an UnavailableError that there is no SDK of a known version.
    """
    symbols.bind("amd")  # without libhsa in the process the SDK aborts it; binding loads it and calls nothing
    if libraries.mapped("libhsa-runtime64.so") is None:
        raise UnavailableError("rocprofiler-sdk: the HIP runtime brought no libhsa-runtime64, which the SDK needs")
    names = ("librocprofiler-sdk.so.1", "librocprofiler-sdk.so.0", "librocprofiler-sdk.so")
    wheels = libraries.wheel_folders("torch/lib", "_rocm_sdk_core/lib", "triton/backends/amd/lib")
    library = libraries.load("rocprofiler-sdk", names, [*wheels, *libraries.rocm_folders("lib")])
    try:
        tracer = RocprofilerTracer(library)
    except DriverError as error:
        raise UnavailableError(f"{library._name} can't be used here: {error}") from None
    atexit.register(tracer.close)
    return tracer


class RocprofilerTracer:
    """The SDK with this process registered; `configure` makes it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("get_status_name", "get_status_string"):
            getattr(library, f"rocprofiler_{name}").restype = c_char_p
        parts = [c_uint32() for _ in range(3)]
        self._call("get_version", *map(byref, parts))
        self.version = tuple(part.value for part in parts)
        if self.version[0] not in LAYOUTS:
            raise UnavailableError(f"{library._name} is version {self.version}; known are 0.x and 1.x")
        self._layout = LAYOUTS[self.version[0]]
        self._names: dict[int, str] = {}
        self._collection: trace.Collection | None = None
        self._running = False
        self._dropped = 0
        self._symbols, self._dispatches, self._buffer = c_uint64(), c_uint64(), c_uint64()
        self._fault: Exception | None = None
        self._ready = False
        # the SDK keeps these addresses until the process ends
        self._initialize, self._configure = _Initialize(self._on_initialize), _Configure(self._on_configure)
        self._on_symbol, self._on_records = _OnCodeObject(self._code_object), _OnBuffer(self._records)
        self._client_name = ctypes.create_string_buffer(b"tritongemm")
        self._result = _ConfigureResult(ctypes.sizeof(_ConfigureResult), ctypes.cast(self._initialize, c_void_p))
        self._register()

    def start(self) -> trace.Collection:
        """Begin a trace; see `trace.KernelTracer`."""
        if self._running:
            raise trace.TraceError("kernel trace: another one is open in this process")
        self.flush()
        now = c_uint64()
        self._call("get_timestamp", byref(now))
        self._collection = trace.Collection(now.value)
        if self._fault:
            self._collection.fail(f"reading kernel names failed: {self._fault!r}")
        self._call("start_context", self._dispatches.value)
        self._running = True
        return self._collection

    def stop(self) -> None:
        """End the trace, if one is open."""
        if self._running:
            self._running = False
            self._call("stop_context", self._dispatches.value)

    def flush(self) -> None:
        """Have the SDK deliver the records that it holds."""
        self._call("flush_buffer", self._buffer.value)

    def close(self) -> None:
        """Stop for good, while the interpreter is still there for the SDK's calls."""
        for context in (self._dispatches, self._symbols):
            self._library.rocprofiler_stop_context(context)
        self._library.rocprofiler_flush_buffer(self._buffer)

    def _register(self) -> None:
        state = c_int()
        self._call("is_initialized", byref(state))
        if state.value:
            raise ConfigurationLockedError(
                "rocprofiler-sdk has been configured already: the GPU was used before tracing was asked for, or "
                "another profiler is attached; configure it right after the imports of a new process"
            )
        self._call("force_configure", self._configure)
        if self._fault:
            raise self._fault
        if not self._ready:
            raise UnavailableError(f"{self._library._name} did not call this process's tool back; is it disabled?")

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, f"rocprofiler_{name}")
        function.argtypes = _CALLS[name]
        status = function(*arguments)
        if status:
            # numbers moved between versions, names did not
            code = (self._library.rocprofiler_get_status_name(status) or b"unknown error").decode()
            text = (self._library.rocprofiler_get_status_string(status) or b"").decode()
            error = DriverError(f"rocprofiler_{name}", status, code, text)
            if code.endswith("CONFIGURATION_LOCKED"):
                raise ConfigurationLockedError(f"{error}; configure it before the process first uses the GPU")
            raise error

    def _on_configure(self, version: int, text: bytes, priority: int, client: int) -> int:
        name = client + self._layout.client_name
        c_void_p.from_address(name).value = ctypes.addressof(self._client_name)
        return ctypes.addressof(self._result)

    def _on_initialize(self, finalize: int, data: int) -> int:
        try:
            self._set_up()
        except Exception as error:  # nothing may escape into the SDK; _register raises it
            self._fault = error
            return -1
        self._ready = True
        return 0

    def _set_up(self) -> None:
        # names come when code is loaded, which may be long before a trace: they have a context of their own
        valid = c_int()
        self._call("create_context", byref(self._symbols))
        handler = self._on_symbol
        self._call("configure_callback_tracing_service", self._symbols.value, _CODE_OBJECT, None, 0, handler, None)
        self._call("create_context", byref(self._dispatches))
        size, watermark = _BUFFER_BYTES, _BUFFER_BYTES // 8 * 7
        shape = self._dispatches.value, size, watermark, _LOSSLESS
        self._call("create_buffer", *shape, self._on_records, None, byref(self._buffer))
        service = self._dispatches.value, _KERNEL_DISPATCH, None, 0, self._buffer.value
        self._call("configure_buffer_tracing_service", *service)
        for context in (self._symbols, self._dispatches):
            self._call("context_is_valid", context.value, byref(valid))
        self._call("start_context", self._symbols.value)

    def _code_object(self, record: _CallbackRecord, user: int, data: int) -> None:
        try:
            raw = bytes(record)
            if struct.unpack_from("<iii", raw, self._layout.kind) != (_CODE_OBJECT, _KERNEL_SYMBOL, _LOAD):
                return
            (payload,) = struct.unpack_from("<Q", raw, self._layout.payload)
            size, kernel = c_uint64.from_address(payload).value, c_uint64.from_address(payload + _SYMBOL_ID).value
            if size < _SYMBOL_BYTES:
                raise ValueError(f"a kernel symbol of {size} bytes")
            name = c_char_p.from_address(payload + _SYMBOL_NAME).value or b""
            self._names[kernel] = name.decode(errors="replace").removesuffix(".kd")
        except Exception as error:  # nothing may escape into the SDK
            self._fault = error

    def _records(self, context: int, buffer: int, headers: Any, count: int, data: int, dropped: int) -> None:
        collection = self._collection
        if collection is None:
            return
        try:
            for index in range(count):
                category, kind, payload = struct.unpack("<IIQ", ctypes.string_at(headers[index], 16))
                if (category, kind) == (_TRACING, _KERNEL_DISPATCH):
                    self._dispatch(collection, ctypes.string_at(payload, _RECORD_BYTES))
            if dropped > self._dropped:  # the SDK never counts from 0 again
                collection.fail(f"rocprofiler-sdk dropped {dropped - self._dropped} records")
            self._dropped = dropped
        except Exception as error:  # nothing may escape into the SDK's thread
            collection.fail(f"reading rocprofiler-sdk's buffer failed: {error!r}")

    def _dispatch(self, collection: trace.Collection, data: bytes) -> None:
        (size,) = struct.unpack_from("<Q", data)
        if size < _RECORD_BYTES:
            raise ValueError(f"a dispatch record of {size} bytes")
        start, end = struct.unpack_from("<QQ", data, _SPAN)
        kernel, dispatch = struct.unpack_from("<QQ", data, _IDS)
        collection.add((dispatch,), trace.KernelRecord(self._names.get(kernel, ""), start, end))

"""Names each driver call in CUDA and in HIP."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import Any

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext import libraries

_OUT = c_void_p  # address of a result; ctypes.byref() goes in

# role: (CUDA symbol, HIP symbol, argument types); "" where a vendor has no such call
_CALLS: dict[str, tuple[str, str, tuple[Any, ...] | None]] = {
    "init": ("cuInit", "hipInit", (c_uint,)),
    "driver_version": ("cuDriverGetVersion", "hipDriverGetVersion", (_OUT,)),
    "device_count": ("cuDeviceGetCount", "hipGetDeviceCount", (_OUT,)),
    "device_get": ("cuDeviceGet", "hipDeviceGet", (_OUT, c_int)),
    "device_name": ("cuDeviceGetName", "hipDeviceGetName", (_OUT, c_int, c_int)),
    "device_bus_id": ("cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId", (_OUT, c_int, c_int)),
    "device_memory": ("cuDeviceTotalMem_v2", "hipDeviceTotalMem", (_OUT, c_int)),
    "device_attribute": ("cuDeviceGetAttribute", "hipDeviceGetAttribute", (_OUT, c_int, c_int)),
    "device_properties": ("", "hipGetDevicePropertiesR0600", (_OUT, c_int)),
    "context_retain": ("cuDevicePrimaryCtxRetain", "", (_OUT, c_int)),
    "context_set": ("cuCtxSetCurrent", "", (c_void_p,)),
    "device_set": ("", "hipSetDevice", (c_int,)),
    "synchronize": ("cuCtxSynchronize", "hipDeviceSynchronize", ()),
    "memory_info": ("cuMemGetInfo_v2", "hipMemGetInfo", (_OUT, _OUT)),
    "alloc": ("cuMemAlloc_v2", "hipMalloc", (_OUT, c_size_t)),
    "free": ("cuMemFree_v2", "hipFree", (c_void_p,)),
    "memset": ("cuMemsetD8Async", "hipMemsetD8Async", (c_void_p, c_ubyte, c_size_t, c_void_p)),
    "granularity": ("cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity", (_OUT, _OUT, c_int)),
    "reserve": ("cuMemAddressReserve", "hipMemAddressReserve", (_OUT, c_size_t, c_size_t, c_ulonglong, c_ulonglong)),
    "unreserve": ("cuMemAddressFree", "hipMemAddressFree", (c_ulonglong, c_size_t)),
    "create_memory": ("cuMemCreate", "hipMemCreate", (_OUT, c_size_t, _OUT, c_ulonglong)),
    "release_memory": ("cuMemRelease", "hipMemRelease", (c_ulonglong,)),
    "map_memory": ("cuMemMap", "hipMemMap", (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong)),
    "unmap_memory": ("cuMemUnmap", "hipMemUnmap", (c_ulonglong, c_size_t)),
    "allow_access": ("cuMemSetAccess", "hipMemSetAccess", (c_ulonglong, c_size_t, _OUT, c_size_t)),
    "module_load": ("cuModuleLoadData", "hipModuleLoadData", (_OUT, c_char_p)),
    "module_unload": ("cuModuleUnload", "hipModuleUnload", (c_void_p,)),
    "module_function": ("cuModuleGetFunction", "hipModuleGetFunction", (_OUT, c_void_p, c_char_p)),
    "function_attribute": ("cuFuncGetAttribute", "hipFuncGetAttribute", (_OUT, c_int, c_void_p)),
    "function_set": ("cuFuncSetAttribute", "", (c_void_p, c_int, c_int)),
    "function_cache": ("cuFuncSetCacheConfig", "", (c_void_p, c_int)),
    "launch": ("", "hipModuleLaunchKernel", (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)),
    "launch_ex": ("cuLaunchKernelEx", "", None),  # its arguments are ctypes objects already
    "stream_create": ("cuStreamCreate", "hipStreamCreateWithFlags", (_OUT, c_uint)),
    "stream_destroy": ("cuStreamDestroy_v2", "hipStreamDestroy", (c_void_p,)),
    "stream_synchronize": ("cuStreamSynchronize", "hipStreamSynchronize", (c_void_p,)),
    "event_create": ("cuEventCreate", "hipEventCreateWithFlags", (_OUT, c_uint)),
    "event_destroy": ("cuEventDestroy_v2", "hipEventDestroy", (c_void_p,)),
    "event_record": ("cuEventRecord", "hipEventRecord", (c_void_p, c_void_p)),
    "event_synchronize": ("cuEventSynchronize", "hipEventSynchronize", (c_void_p,)),
    "event_elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", (_OUT, c_void_p, c_void_p)),
    "capture_begin": ("cuStreamBeginCapture_v2", "hipStreamBeginCapture", (c_void_p, c_int)),
    "capture_end": ("cuStreamEndCapture", "hipStreamEndCapture", (c_void_p, _OUT)),
    "capture_mode": ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", (_OUT,)),
    "graph_instantiate": ("cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags", (_OUT, c_void_p, c_ulonglong)),
    "graph_launch": ("cuGraphLaunch", "hipGraphLaunch", (c_void_p, c_void_p)),
    "graph_exec_destroy": ("cuGraphExecDestroy", "hipGraphExecDestroy", (c_void_p,)),
    "graph_destroy": ("cuGraphDestroy", "hipGraphDestroy", (c_void_p,)),
    "graph_nodes": ("cuGraphGetNodes", "", (c_void_p, _OUT, _OUT)),
    "graph_edges": ("cuGraphGetEdges_v2", "", (c_void_p, _OUT, _OUT, _OUT, _OUT)),
    "node_type": ("cuGraphNodeGetType", "", (c_void_p, _OUT)),
    "node_kernel": ("cuGraphKernelNodeGetParams_v2", "", (c_void_p, _OUT)),
    "node_memset": ("cuGraphMemsetNodeGetParams", "", (c_void_p, _OUT)),
    "node_attribute": ("cuGraphKernelNodeGetAttribute", "", (c_void_p, c_int, _OUT)),
    "kernel_param": ("cuKernelGetParamInfo", "", (c_void_p, c_size_t, _OUT, _OUT)),
    "function_param": ("cuFuncGetParamInfo", "", (c_void_p, c_size_t, _OUT, _OUT)),
    "tensor_map": (
        "cuTensorMapEncodeTiled",
        "",
        (_OUT, c_int, c_uint, c_void_p, _OUT, _OUT, _OUT, _OUT, c_int, c_int, c_int, c_int),
    ),
}

_ATTRIBUTES = {
    "nvidia": {
        "compute_units": 16,
        "lds_bytes": 97,  # the opt-in limit
        "l2_bytes": 38,
        "clock_khz": 13,
        "wave_size": 10,
        "max_threads": 1,
        "memory_khz": 36,
        "memory_bits": 37,
        "major": 75,
        "minor": 76,
    },
    "amd": {
        "compute_units": 63,
        "lds_bytes": 74,
        "l2_bytes": 19,
        "clock_khz": 5,
        "wave_size": 87,
        "max_threads": 56,
        "memory_khz": 60,
        "memory_bits": 59,
    },
}

# the same numbers in both drivers
FUNCTION_ATTRIBUTES = {"max_threads": 0, "shared_bytes": 1, "local_bytes": 3, "registers": 4}
DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
PREFER_SHARED = 1  # CUfunc_cache
NON_BLOCKING = 1
CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 1, 2
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # keys of a launch's `extra` list
BUFFER_END = {"nvidia": 0, "amd": 3}

# hipDeviceProp_t of ROCm 6 and later (suffix R0600)
HIP_PROPERTIES_BYTES, HIP_ARCH_OFFSET, HIP_ARCH_BYTES = 1472, 1160, 256


@dataclass
class Api:
    """The driver of one vendor, whose calls are looked up by role."""

    vendor: str  # `nvidia` or `amd`
    library: ctypes.CDLL  # the opened library
    # Checked calls by role; each raises `DriverError` unless the driver reports success.
    calls: dict[str, Callable[..., int]] = field(default_factory=dict)
    raw: dict[str, Callable[..., int]] = field(default_factory=dict)  # the same calls unchecked, for the hot path
    attributes: dict[str, int] = field(default_factory=dict)  # numbers of the device attributes
    # Loaded code stays until the process ends, as a profiler wants it that takes names from it.
    keeps_code: bool = False

    def error(self, call: str, code: int) -> DriverError:
        """Return the exception for a status other than success."""
        if self.vendor == "nvidia":
            name, text = (self._text(f"cuGetError{what}", code) for what in ("Name", "String"))
        else:
            name, text = (self._text(f"hipDrvGetError{what}", code) for what in ("Name", "String"))
        return DriverError(call, code, name or "unknown error", text)

    def symbol(self, role: str) -> str:
        """Return what this vendor calls `role`; "" if it has no such call."""
        nvidia, amd, _ = _CALLS[role]
        return nvidia if self.vendor == "nvidia" else amd

    def _text(self, function: str, code: int) -> str:
        text = c_char_p()
        lookup = getattr(self.library, function, None)
        if lookup is None:  # HIP before version 6
            return ""
        lookup.argtypes = (c_int, POINTER(c_char_p))
        lookup(code, ctypes.byref(text))
        return (text.value or b"").decode(errors="replace")


def address_of(call: Any) -> int:
    """Return the address of a driver's call in this process."""
    return ctypes.cast(call, c_void_p).value or 0


def bind(vendor: str) -> Api:
    """Open the vendor's driver library and look up every call."""
    if vendor == "nvidia":
        library = libraries.load("CUDA driver", ("libcuda.so.1",))
    else:
        names = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
        # PyTorch's own copy first: its tensors belong to the runtime that PyTorch loads.
        wheels = libraries.wheel_folders("torch/lib", "_rocm_sdk_core/lib")
        library = libraries.load("HIP runtime", names, [*wheels, *libraries.rocm_folders("lib")])
    api = Api(vendor, library, attributes=_ATTRIBUTES[vendor])
    for role in _CALLS:
        if api.symbol(role):
            _bind_call(api, role)
    return api


def _bind_call(api: Api, role: str) -> None:
    name = api.symbol(role)

    def missing(*_: Any) -> int:
        raise UnavailableError(f"{api.library._name} has no {name}; a newer driver is needed")

    def check(status: Any, *_: Any) -> Any:
        if status:
            raise api.error(name, status)
        return status

    try:
        # indexing makes a new function object each time: one with the check, one without
        checked, raw = api.library[name], api.library[name]
    except AttributeError:
        api.calls[role] = api.raw[role] = missing
        return
    types = _CALLS[role][2]
    if types is not None:
        checked.argtypes = raw.argtypes = types
    checked.restype = raw.restype = c_int
    checked.errcheck = check
    api.calls[role], api.raw[role] = checked, raw

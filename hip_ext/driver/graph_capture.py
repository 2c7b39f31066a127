"""Reads what a call queues from the graph that captures it: its kernels in order, and memory set to zero.

CUDA only: HIP's graphs do not say how many bytes a parameter has. Layouts and numbers from cuda.h of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass, replace

from tritongemm.hip_ext.driver.module import Function, Grid, PreparedLaunch
from tritongemm.hip_ext.driver.symbols import BUFFER_POINTER, BUFFER_SIZE, CAPTURE_RELAXED, Api, address_of

_KERNEL, _MEMSET = 0, 2  # CUgraphNodeType
_CLUSTER, _POLICY = 4, 5  # CUlaunchAttributeID
_ZERO = (2, 10)  # likewise: all programs at once, a domain of memory of its own
_SPREAD = 1  # CUclusterSchedulingPolicy, that of all our launches
_EDGES = {0: False, 0x10001: True}  # CUgraphEdgeData: whether the next kernel may start early, at the port for that
_MOST_PARAM_BYTES = 4096  # the most that a kernel takes


class _KernelNode(ctypes.Structure):
    _fields_ = [  # CUDA_KERNEL_NODE_PARAMS_v2
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


class _MemsetNode(ctypes.Structure):
    _fields_ = [  # CUDA_MEMSET_NODE_PARAMS
        ("address", c_void_p),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("size", c_uint),  # of an element
        ("width", c_size_t),  # elements
        ("height", c_size_t),
    ]


class _AttributeValue(ctypes.Structure):
    _fields_ = [("numbers", c_uint * 3), ("pad", c_ubyte * 52)]  # CUlaunchAttributeValue


@dataclass(frozen=True)
class Captured:
    """A captured launch of one kernel."""

    handle: int  # the driver's, of the loaded code
    # grid, block: thread blocks, threads of one
    grid: Grid
    block: Grid
    cluster: Grid  # neighbours along x, y, z that form a cluster
    shared: int  # bytes of dynamic shared memory
    params: bytes  # the parameter block
    offsets: tuple[int, ...]  # where each parameter starts in it; empty where the block was passed as one piece
    overlap: bool = False  # it may start before the one before it ends

    def prepare(self, api: Api) -> PreparedLaunch:
        """Prepare the same launch, so that its parameters can be replaced."""
        code = Function(api, None, c_void_p(self.handle), "a library's kernel")
        shape = (*self.grid, *self.block, self.shared)
        return PreparedLaunch(api, code, shape, self.params, (self.cluster, self.overlap), self.offsets)


@dataclass(frozen=True)
class Cleared:
    """A captured call that sets memory to zero."""

    count: int  # bytes
    params: bytes  # where it starts

    def prepare(self, api: Api) -> PreparedMemset:
        """Prepare the same call, so that its address can be replaced."""
        return PreparedMemset(api, self.count, self.params)


class PreparedMemset:
    """A prepared call that sets memory to zero; not to be shared between threads."""

    __slots__ = ("_address", "_api", "_call", "_count", "params")

    def __init__(self, api: Api, count: int, params: bytes) -> None:
        self._api, self._call, self._count = api, api.raw["memset"], count
        self.params = bytearray(params)
        self._address = c_void_p.from_buffer(self.params)

    def launch(self, stream: int = 0) -> None:
        """Queue the call on the stream with this handle."""
        status = self._call(self._address, 0, self._count, stream)
        if status:
            self.refuse(status)

    def refuse(self, status: int) -> None:
        """Raise what a status of the driver means."""
        raise self._api.error(self._api.symbol("memset"), status)

    def described(self) -> tuple[object, ...]:
        """Return the call as compiled code takes it; see `PreparedLaunch.described`."""
        return 2, 0, address_of(self._call), 0, (0,) * 7, b"", 0, bytes(self.params), (), self._count


def available(api: Api) -> bool:
    """Return whether this vendor's drivers can list what a graph holds."""
    return bool(api.symbol("graph_nodes"))


def captured_launches(api: Api, stream: int, queue: Callable[[], object]) -> list[Captured | Cleared] | None:
    """Return what a call queues on a stream, and does not run; None unless it is in one order and can be repeated."""
    graph = c_void_p()
    # Relaxed: the first call of a library may load code.
    api.calls["capture_begin"](stream, CAPTURE_RELAXED)
    try:
        try:
            queue()
        finally:
            api.calls["capture_end"](stream, byref(graph))
        return _chain(api, graph)
    finally:
        if graph:
            api.calls["graph_destroy"](graph)


def _chain(api: Api, graph: c_void_p) -> list[Captured | Cleared] | None:
    count, links = c_size_t(), c_size_t()
    api.calls["graph_nodes"](graph, None, byref(count))
    api.calls["graph_edges"](graph, None, None, None, byref(links))
    if not count.value or links.value != count.value - 1:
        return None
    nodes, before, after = ((c_void_p * count.value)() for _ in range(3))
    how = (ctypes.c_uint64 * count.value)()
    api.calls["graph_nodes"](graph, nodes, byref(count))
    if links.value:
        api.calls["graph_edges"](graph, before, after, how, byref(links))
    following = dict(itertools.islice(zip(before, after, strict=True), links.value))
    if not set(how) <= _EDGES.keys() or any(following.get(b) != a for b, a in itertools.pairwise(nodes)):
        return None
    early = {node: _EDGES[kind] for node, kind in zip(after, how, strict=True)}
    found: list[Captured | Cleared] = []
    for node in nodes:
        launch = _launch(api, node or 0, early.get(node, False))
        if launch is None:
            return None
        found.append(launch)
    return found


def _launch(api: Api, node: int, early: bool) -> Captured | Cleared | None:
    kind = c_int()
    api.calls["node_type"](node, byref(kind))
    if kind.value == _KERNEL:
        kernel = _kernel(api, node)
        return None if kernel is None else replace(kernel, overlap=early)
    return _memset(api, node) if kind.value == _MEMSET and not early else None


def _memset(api: Api, node: int) -> Cleared | None:
    found = _MemsetNode()
    api.calls["node_memset"](node, byref(found))
    if found.value or found.height != 1:
        return None
    return Cleared(found.width * found.size, struct.pack("<Q", found.address or 0))


def _kernel(api: Api, node: int) -> Captured | None:
    found = _KernelNode()
    api.calls["node_kernel"](node, byref(found))
    handle = found.kernel or found.function
    pieces = list(_pieces(api, "kernel_param" if found.kernel else "function_param", handle))
    if found.params:
        block = bytearray(max((o + size for o, size in pieces), default=0))
        for at, (offset, size) in zip(found.params[: len(pieces)], pieces, strict=True):
            block[offset : offset + size] = ctypes.string_at(at, size)
        params, offsets = bytes(block), tuple(offset for offset, _ in pieces)
    else:
        params, offsets = _parameter_block(found.extra), ()
    if not params:
        return None
    x, y, z = (max(1, c) for c in _attribute(api, node, _CLUSTER))
    cluster = x, y, z
    if cluster != (1, 1, 1) and _attribute(api, node, _POLICY)[0] != _SPREAD:
        return None
    if any(_attribute(api, node, other)[0] for other in _ZERO):
        return None
    return Captured(handle, tuple(found.grid), tuple(found.block), cluster, found.shared, params, offsets)


def _attribute(api: Api, node: int, which: int) -> list[int]:
    value = _AttributeValue()
    api.calls["node_attribute"](node, which, byref(value))
    return list(value.numbers)


def _pieces(api: Api, call: str, handle: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and size of each parameter; the driver ends the list by refusing the next."""
    index = 0
    while True:
        offset, size = c_size_t(), c_size_t()
        if api.raw[call](handle, index, byref(offset), byref(size)):
            return
        yield offset.value, size.value
        index += 1


def _parameter_block(extra: ctypes._Pointer[c_void_p]) -> bytes:
    """Return the parameter block of a list of keys and values; empty where it is not one."""
    found: dict[int, int] = {}
    for i in range(0, 4, 2):
        if not extra or not extra[i]:
            break
        found[extra[i] or 0] = extra[i + 1] or 0
    if found.keys() != {BUFFER_POINTER, BUFFER_SIZE}:
        return b""
    size = c_size_t.from_address(found[BUFFER_SIZE]).value
    return ctypes.string_at(found[BUFFER_POINTER], size) if size <= _MOST_PARAM_BYTES else b""

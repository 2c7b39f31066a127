"""Loads code: `Module`, `Function` and `PreparedLaunch`, a launch that is prepared once and repeated cheaply."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_uint, c_void_p
from functools import cached_property, partial

from tritongemm.core.errors import UnavailableError
from tritongemm.hip_ext.driver import symbols
from tritongemm.hip_ext.driver.symbols import Api

Grid = tuple[int, int, int]

_PLAIN_SHARED = 48 * 1024  # what a CUDA kernel may use unless it asks for more
_PORTABLE_CLUSTER = 8
_ALONE: Grid = (1, 1, 1)  # no cluster


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint * 16)]  # CUlaunchAttribute


class _LaunchConfig(ctypes.Structure):
    _fields_ = [  # CUlaunchConfig
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("count", c_uint),
    ]


class Module:
    """A code object on the device; `unload` frees it."""

    def __init__(self, api: Api, code: bytes) -> None:
        self._api, self._handle = api, c_void_p()
        api.calls["module_load"](byref(self._handle), code)

    def function(self, symbol: str) -> Function:
        """Return the kernel called `symbol`."""
        handle = c_void_p()
        self._api.calls["module_function"](byref(handle), self._handle, symbol.encode())
        return Function(self._api, self, handle, symbol)

    def unload(self) -> None:
        """Free the code, unless a profiler needs all code; its functions must not be launched again."""
        if self._handle and not self._api.keeps_code:
            self._api.calls["module_unload"](self._handle)
            self._handle = c_void_p()


class Function:
    """One kernel, of a module that stays loaded as long as this is held, or of a library (the module is None)."""

    def __init__(self, api: Api, module: Module | None, handle: c_void_p, symbol: str) -> None:
        self.symbol = symbol
        self._api, self._module, self.handle = api, module, handle
        self._shared_limit = 0
        self._wide_cluster = False

    @cached_property
    def attributes(self) -> dict[str, int]:
        """The kernel's attributes as the driver states them.

        ``registers``, ``local_bytes`` (scratch memory) of a thread, ``shared_bytes`` (static) and ``max_threads`` of a
        block.
        """
        values, out = {}, c_int()
        for name, number in symbols.FUNCTION_ATTRIBUTES.items():
            self._api.calls["function_attribute"](byref(out), number, self.handle)
            values[name] = out.value
        return values

    def prepare(
        self,
        grid: Grid,
        block: Grid,
        shared_bytes: int,
        params: bytes,
        cluster: int = 1,
        offsets: Sequence[int] = (),
        overlap: bool = False,
    ) -> PreparedLaunch:
        """Prepare a launch of thread blocks along x, y, z, of threads along x, y, z, with dynamic shared memory (LDS).

        `cluster` neighbours along x form a cluster, whose blocks the grid counts singly (Hopper or later). CUDA needs
        the `offsets` of the packed parameters where a tensor map is among them: its compiler aligns one in the constant
        bank, not in the block, so the block can't be taken as it is. With `overlap` the kernel waits for earlier ones
        itself, and may start before they end (Hopper or later).

        Raises:
            DriverError: the device can't give a block that much shared memory, or form such a cluster.
            UnavailableError: this driver has no clusters.
        """
        if cluster > 1 and not self._api.symbol("launch_ex"):
            raise UnavailableError(f"{self.symbol} wants clusters of {cluster}, which only NVIDIA drivers launch")
        if self._api.vendor == "nvidia":
            self._allow(shared_bytes, cluster)
        by_address = offsets if self._api.vendor == "nvidia" else ()
        return PreparedLaunch(
            self._api, self, (*grid, *block, shared_bytes), params, ((cluster, 1, 1), overlap), by_address
        )

    def launch(
        self,
        grid: Grid,
        block: Grid,
        shared_bytes: int,
        params: bytes,
        stream: int = 0,
        cluster: int = 1,
        offsets: Sequence[int] = (),
    ) -> None:
        """Launch once; arguments and errors are those of `prepare` and `PreparedLaunch.launch`."""
        self.prepare(grid, block, shared_bytes, params, cluster, offsets).launch(stream)

    def _allow(self, shared_bytes: int, cluster: int) -> None:
        """Raise the kernel's limits where this launch needs it."""
        calls = self._api.calls
        if shared_bytes > self._shared_limit and shared_bytes + self.attributes["shared_bytes"] > _PLAIN_SHARED:
            calls["function_set"](self.handle, symbols.DYNAMIC_SHARED, shared_bytes)
            calls["function_cache"](self.handle, symbols.PREFER_SHARED)
            self._shared_limit = shared_bytes
        if cluster > _PORTABLE_CLUSTER and not self._wide_cluster:
            calls["function_set"](self.handle, symbols.NON_PORTABLE_CLUSTER, 1)
            self._wide_cluster = True


class PreparedLaunch:
    """A launch with everything but the stream fixed. Not to be shared between threads."""

    __slots__ = ("_api", "_block", "_config", "_go", "_keep", "_offsets", "_shape", "function", "params")

    def __init__(
        self,
        api: Api,
        function: Function,
        shape: tuple[int, ...],
        params: bytes,
        together: tuple[Grid, bool],
        offsets: Sequence[int],
    ) -> None:
        self._api, self.function, self._shape, self._offsets = api, function, shape, tuple(offsets)
        self.params = bytearray(params)
        # ctypes reads the bytearray in place, so a patch needs no copy
        self._block = (ctypes.c_char * len(params)).from_buffer(self.params)
        start, size = ctypes.addressof(self._block), ctypes.c_size_t(len(params))
        if offsets:
            self._keep: tuple[object, ...] = ((c_void_p * len(offsets))(*(start + offset for offset in offsets)),)
            where: tuple[object, object] = ctypes.cast(self._keep[0], c_void_p), None
        else:
            keys = symbols.BUFFER_POINTER, start, symbols.BUFFER_SIZE, ctypes.addressof(size)
            self._keep = ((c_void_p * 5)(*keys, symbols.BUFFER_END[api.vendor]), size)
            where = None, ctypes.cast(self._keep[0], c_void_p)
        self._config: _LaunchConfig | None = None
        if api.symbol("launch_ex"):  # fewer arguments, which cost time each
            self._config = _extended(shape, *together)
            self._go: Callable[..., int] = partial(api.raw["launch_ex"], byref(self._config), function.handle, *where)
        else:
            launch, head = api.raw["launch"], (function.handle, *map(c_uint, shape))
            self._go = lambda stream: launch(*head, stream, *where)

    def set_bytes(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes, e.g. an address or a tensor map, at byte `offset` of the parameter block."""
        if offset + len(data) > len(self.params):
            raise ValueError(f"{len(data)} bytes at {offset} overrun a parameter block of {len(self.params)}")
        self.params[offset : offset + len(data)] = data

    def launch(self, stream: int = 0) -> None:
        """Launch on the stream with this handle."""
        if self._config is None:
            status = self._go(stream)
        else:
            self._config.stream = stream
            status = self._go()
        if status:
            self.refuse(status)

    def refuse(self, status: int) -> None:
        """Raise what a status of the driver means."""
        raise self._api.error(self._api.symbol("launch_ex" if self._config else "launch"), status)

    def described(self) -> tuple[object, ...]:
        """Return the call as compiled code takes it: which of the driver's it is, and its arguments but the stream."""
        config, head = self._config, (self.function.handle.value, tuple(self._shape))
        kind, end = 0 if config else 1, symbols.BUFFER_END[self._api.vendor]
        attributes = bytes(ctypes.cast(config.attributes, POINTER(_LaunchAttribute * 3)).contents) if config else b""
        count = config.count if config else 0
        driver = symbols.address_of(self._api.raw["launch_ex" if config else "launch"])
        return kind, end, driver, *head, attributes, count, bytes(self.params), self._offsets, 0


def _extended(shape: tuple[int, ...], cluster: Grid, overlap: bool) -> _LaunchConfig:
    attributes, count = (_LaunchAttribute * 3)(), 0
    if cluster != _ALONE:
        attributes[0].id, attributes[0].value[:3] = 4, cluster  # CLUSTER_DIMENSION
        attributes[1].id, attributes[1].value[0] = 5, 1  # CLUSTER_SCHEDULING_POLICY_PREFERENCE: spread
        count = 2
    if overlap:
        attributes[count].id, attributes[count].value[0] = 6, 1  # PROGRAMMATIC_STREAM_SERIALIZATION
        count += 1
    return _LaunchConfig(shape[:3], shape[3:6], shape[6], None, attributes, count)

"""Orders and times work on the device: `Stream`, `Event` and `Graph`."""

from __future__ import annotations

from ctypes import byref, c_float, c_int, c_ulonglong, c_void_p

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext.driver import symbols
from tritongemm.hip_ext.driver.symbols import Api


class Stream:
    """A queue of launches, which does not wait for the default stream."""

    def __init__(self, api: Api) -> None:
        self._api, self._handle = api, c_void_p()
        api.calls["stream_create"](byref(self._handle), symbols.NON_BLOCKING)

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""
        return self._handle.value or 0

    def synchronize(self) -> None:
        """Wait until everything queued on the stream is done."""
        self._api.calls["stream_synchronize"](self._handle)

    def destroy(self) -> None:
        """Destroy the stream."""
        if self._handle:
            self._api.calls["stream_destroy"](self._handle)
            self._handle = c_void_p()


class Event:
    """A point in a stream that can be timed."""

    def __init__(self, api: Api) -> None:
        self._api, self._handle = api, c_void_p()
        api.calls["event_create"](byref(self._handle), 0)

    def record(self, stream: int = 0) -> None:
        """Record the event behind what is queued on the stream with this handle."""
        self._api.calls["event_record"](self._handle, stream)

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        self._api.calls["event_synchronize"](self._handle)

    def elapsed_ms(self, later: Event) -> float:
        """Return the milliseconds from this event to a later one."""
        elapsed = c_float()
        self._api.calls["event_elapsed"](byref(elapsed), self._handle, later._handle)
        return elapsed.value

    def destroy(self) -> None:
        """Destroy the event."""
        if self._handle:
            self._api.calls["event_destroy"](self._handle)
            self._handle = c_void_p()


class Graph:
    """Launches recorded from a stream, replayed as one."""

    def __init__(self, api: Api, graph: c_void_p) -> None:
        self._api, self._graph, self._exec = api, graph, c_void_p()
        try:
            api.calls["graph_instantiate"](byref(self._exec), graph, 0)
        except DriverError:
            api.calls["graph_destroy"](graph)
            raise

    def launch(self, stream: int = 0) -> None:
        """Queue all launches of the graph on the stream with this handle."""
        self._api.calls["graph_launch"](self._exec, stream)

    def destroy(self) -> None:
        """Destroy the graph."""
        if self._exec:
            self._api.calls["graph_exec_destroy"](self._exec)
            self._api.calls["graph_destroy"](self._graph)
            self._exec = c_void_p()


_CAPTURE_INFO = {"nvidia": "cuStreamGetCaptureInfo_v2", "amd": "hipStreamGetCaptureInfo_v2"}
_ACTIVE = 1


def capture_id(api: Api, stream: int) -> int:
    """Return the number of the capture that `stream` is part of, never used twice in a process; 0 if it is in none.

    A broken capture raises a DriverError, a driver that is too old to report it an UnavailableError.
    """
    name = _CAPTURE_INFO[api.vendor]
    try:
        call = api.library[name]
    except AttributeError:
        raise UnavailableError(f"{api.library._name} has no {name}; a newer driver is needed") from None
    call.argtypes, call.restype = (c_void_p,) * 6, c_int
    status, number = c_int(), c_ulonglong()
    code = call(stream, byref(status), byref(number), None, None, None)
    if code:
        raise api.error(name, code)
    return number.value if status.value == _ACTIVE else 0

"""Two driver calls that only serving makes: which capture a stream is part of, and a tensor map moved elsewhere."""

from __future__ import annotations

import ctypes
from ctypes import addressof, byref, c_int, c_ulonglong, c_void_p

from tritongemm.errors import UnavailableError
from tritongemm.hip_ext import tensor_map
from tritongemm.hip_ext.symbols import Api

_CAPTURE_INFO = {"nvidia": "cuStreamGetCaptureInfo_v2", "amd": "hipStreamGetCaptureInfo_v2"}
_REPLACE = "cuTensorMapReplaceAddress"
_ACTIVE = 1
_ALIGN = 64


def capture_id(api: Api, stream: int) -> int:
    """Number of the capture that `stream` is part of, never used twice in a process; 0 if it is in none.

    Raises:
        DriverError: the capture is broken.
        UnavailableError: the driver is too old to tell.
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


class MovingMap:
    """A tensor map whose matrix moves: the same shape and block at another address.

    Args:
        api: the driver.
        data: the 128 bytes that `tensor_map.encode` made for any address.

    Raises:
        UnavailableError: the driver can't move one.
    """

    __slots__ = ("_api", "_at", "_call", "_storage", "data")

    def __init__(self, api: Api, data: bytes) -> None:
        try:
            self._call = api.library[_REPLACE]
        except AttributeError:
            raise UnavailableError(f"{api.library._name} has no {_REPLACE}; a newer driver is needed") from None
        self._call.argtypes, self._call.restype = (c_void_p, c_void_p), c_int
        self._api = api
        self._storage = (ctypes.c_char * (tensor_map.BYTES + _ALIGN))()
        offset = -addressof(self._storage) % _ALIGN
        self._at = addressof(self._storage) + offset
        self.data = memoryview(self._storage).cast("B")[offset : offset + tensor_map.BYTES]
        self.data[:] = data

    def move(self, address: int) -> memoryview:
        """The map's 128 bytes for a matrix at `address`, a multiple of 16; valid until the next move.

        Raises:
            DriverError: the driver refused the address.
        """
        code = self._call(self._at, address)
        if code:
            raise self._api.error(_REPLACE, code)
        return self.data

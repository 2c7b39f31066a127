"""Encodes tensor maps: 128 bytes that describe a matrix and the block to fetch to Hopper's copy engine (TMA)."""

import ctypes
from collections.abc import Callable
from ctypes import addressof, byref, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.hip_ext.driver.symbols import Api

BYTES = 128
_WORD = 8  # bytes
_ALIGN = 128
_L2_PROMOTION_128B = 2
_ZEROS_OUTSIDE = 0  # what is read beyond the edges of the matrix

# The compiler reports an element type by the device's numbering; the driver counts floats in another order.
_HOST_TYPE = {8: 10, 9: 8, 10: 9}

# Up to this driver a map of less than 128 KiB must have a flag cleared, as CUTLASS and Triton do
_FLAG_DRIVER, _FLAG_BYTES, _FLAG = 13010, 128 * 1024, 1 << 21


def find_address_offset(encode: Callable[[int], bytes]) -> int | None:
    """Return the byte of a tensor map at which the matrix's plain address stands; None where it can't be found."""
    addresses = [(i << 44) + i * 0x123456780 for i in (1, 2, 5)]
    maps = [encode(address) for address in addresses]
    for at in range(0, BYTES, _WORD):
        rest = {data[:at] + data[at + _WORD :] for data in maps}
        if len(rest) == 1 and [int.from_bytes(data[at : at + _WORD], "little") for data in maps] == addresses:
            return at
    return None


@dataclass(frozen=True)
class TensorMapLayout:
    """A matrix in memory, and the block that one copy fetches: a tensor map without the address.

    Attributes:
        elem_type, elem_size, swizzle: as the compiler's `tensordesc_meta` reports them
    """

    elem_type: int
    elem_size: int
    shape: tuple[int, int]  # rows and columns of the matrix in elements
    row_stride: int  # elements from one row to the next; in bytes a multiple of 16
    box: tuple[int, int]  # rows and columns of the block
    swizzle: int

    def encode(self, api: Api, address: int) -> bytes:
        """Return the tensor map of a matrix whose first element is at a device address, a multiple of 16."""
        if not api.symbol("tensor_map"):
            raise UnavailableError("tensor maps need an NVIDIA driver")
        if address % 16 or self.row_stride * self.elem_size % 16:
            raise InputError(
                f"a tensor map needs address and row stride in multiples of 16 bytes, not {address:#x} and "
                f"{self.row_stride} x {self.elem_size}"
            )
        rows, columns = self.shape
        storage = (ctypes.c_char * (BYTES + _ALIGN))()
        offset = -ctypes.addressof(storage) % _ALIGN
        descriptor = (c_ulonglong * (BYTES // 8)).from_buffer(storage, offset)
        stride_bytes = self.row_stride * self.elem_size
        api.calls["tensor_map"](
            byref(descriptor),
            _HOST_TYPE.get(self.elem_type, self.elem_type),
            2,
            address,
            byref((c_ulonglong * 2)(columns, rows)),
            byref((c_ulonglong * 2)(stride_bytes, stride_bytes * rows)),
            byref((c_uint * 2)(self.box[1], self.box[0])),
            byref((c_uint * 2)(1, 1)),
            0,
            self.swizzle,
            _L2_PROMOTION_128B,
            _ZEROS_OUTSIDE,
        )
        version = c_int()
        api.calls["driver_version"](byref(version))
        if (
            version.value <= _FLAG_DRIVER
            and (columns - 1) * self.elem_size + (rows - 1) * stride_bytes + 1 < _FLAG_BYTES
        ):
            descriptor[1] &= ~_FLAG
        return bytes(descriptor)


_REPLACE = "cuTensorMapReplaceAddress"
_MOVING_ALIGN = 64


class MovingMap:
    """A tensor map whose matrix moves: the same shape and block at another address."""

    __slots__ = ("_api", "_at", "_call", "_storage", "data")

    def __init__(self, api: Api, data: bytes) -> None:
        try:
            self._call = api.library[_REPLACE]
        except AttributeError:
            raise UnavailableError(f"{api.library._name} has no {_REPLACE}; a newer driver is needed") from None
        self._call.argtypes, self._call.restype = (c_void_p, c_void_p), c_int
        self._api = api
        self._storage = (ctypes.c_char * (BYTES + _MOVING_ALIGN))()
        offset = -addressof(self._storage) % _MOVING_ALIGN
        self._at = addressof(self._storage) + offset
        self.data = memoryview(self._storage).cast("B")[offset : offset + BYTES]
        self.data[:] = data

    def move(self, address: int) -> memoryview:
        """Return the map's 128 bytes for a matrix at `address`, a multiple of 16; valid until the next move."""
        code = self._call(self._at, address)
        if code:
            raise self._api.error(_REPLACE, code)
        return self.data

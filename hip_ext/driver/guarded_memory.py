"""Memory of a device that ends where nothing is mapped, so that a kernel which reaches beyond it faults."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p
from typing import Any

from tritongemm.core.errors import DriverError
from tritongemm.core.integers import round_up
from tritongemm.hip_ext.driver.symbols import Api

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

    It is given back when this object goes, which whoever holds it has to delay until the device has done with it.

    Args:
        api: the driver.
        device: the device's ordinal.
        nbytes: its size, at least 1.

    Attributes:
        address: of its first byte, a multiple of 16.
        nbytes: its size.

    Raises:
        DriverError: there is too little memory, or the device maps none by pages.
        UnavailableError: the driver has no such calls.
    """

    def __init__(self, api: Api, device: int, nbytes: int) -> None:
        self._api, self.nbytes = api, nbytes
        self._base, self._handle = c_ulonglong(), c_ulonglong()
        properties = _Properties(kind=_PINNED, place=_ON_DEVICE, device=device)
        page = c_size_t()
        api.calls["granularity"](byref(page), byref(properties), _LEAST_GRANULARITY)
        self._mapped = round_up(nbytes, page.value)
        self._reserved = self._mapped + page.value  # the page behind it stays empty
        self._is_mapped = False
        api.calls["reserve"](byref(self._base), self._reserved, 0, 0, 0)
        try:
            api.calls["create_memory"](byref(self._handle), self._mapped, byref(properties), 0)
            api.calls["map_memory"](self._base, self._mapped, 0, self._handle, 0)
            self._is_mapped = True
            access = _Access(place=_ON_DEVICE, device=device, flags=_READ_WRITE)
            api.calls["allow_access"](self._base, self._mapped, byref(access), 1)
        except DriverError:
            self._give_back()
            raise
        self.address = self._base.value + self._mapped - round_up(nbytes, ALIGNMENT_BYTES)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What PyTorch makes a tensor of bytes from, which keeps hold of this object."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        # A device that was lost takes nothing back, and neither does a driver that has ended.
        with suppress(DriverError):
            self._give_back()

    def _give_back(self) -> None:
        if self._is_mapped:
            self._is_mapped = False
            self._api.calls["unmap_memory"](self._base, self._mapped)
        if self._handle:
            handle, self._handle = self._handle, c_ulonglong()
            self._api.calls["release_memory"](handle)
        if self._base:
            base, self._base = self._base, c_ulonglong()
            self._api.calls["unreserve"](base, self._reserved)

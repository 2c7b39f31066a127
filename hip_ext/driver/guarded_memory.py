"""Allocates device memory that ends where nothing is mapped, so that a kernel which reaches beyond it faults."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import ExitStack, suppress
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

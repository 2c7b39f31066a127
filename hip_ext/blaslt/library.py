"""Binds cuBLASLt and hipBLASLt alike: D = op(A) op(B) (+ C) with every algorithm the library has for it.

Two tables (`tables`), one code; `matmul` runs the products; matrices are column-major, as BLAS
has it. Algorithms come from the heuristics, asked for many. hipBLASLt keeps further ones behind C++ entry points, which
`cpp_symbols` reaches; cuBLASLt can also rebuild an algorithm from its attributes, and so make more (`variants`). Only
hipBLASLt's C++ side names the kernel; cuBLASLt gives tile, stages and other attributes instead. hipBLASLt's side
has never run on AMD hardware, only against a stand-in library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.blaslt.cpp_symbols import CppExtension
from tritongemm.hip_ext.blaslt.tables import TABLES, Table, result_type

_P = c_void_p
_CALLS: dict[str, tuple[Any, ...]] = {
    "Create": (_P,),
    "MatmulDescCreate": (_P, c_int, c_int),
    "MatmulDescDestroy": (_P,),
    "MatmulDescSetAttribute": (_P, c_int, _P, c_size_t),
    "MatrixLayoutCreate": (_P, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutDestroy": (_P,),
    "MatrixLayoutSetAttribute": (_P, c_int, _P, c_size_t),
    "MatmulPreferenceCreate": (_P,),
    "MatmulPreferenceDestroy": (_P,),
    "MatmulPreferenceSetAttribute": (_P, c_int, _P, c_size_t),
    "MatmulAlgoGetHeuristic": (*[_P] * 7, c_int, _P, _P),
    "Matmul": (*[_P] * 14, c_size_t, _P),
}
_NVIDIA_CALLS: dict[str, tuple[Any, ...]] = {
    "MatmulAlgoInit": (_P, *[c_int] * 7, _P),
    "MatmulAlgoCheck": (*[_P] * 8,),
    "MatmulAlgoCapGetAttribute": (_P, c_int, _P, c_size_t, _P),
    "MatmulAlgoConfigSetAttribute": (_P, c_int, _P, c_size_t),
    "MatmulAlgoConfigGetAttribute": (_P, c_int, _P, c_size_t, _P),
}
_AMD_CALLS: dict[str, tuple[Any, ...]] = {"GetVersion": (_P, _P), "GetGitRevision": (_P, _P)}


@cache
def open_library(vendor: str) -> Library:
    """Return the BLASLt library of ``nvidia`` or ``amd``: torch's, or the first found."""
    table = TABLES[vendor]
    wheels = libraries.wheel_folders(*(f for f in table.folders if not f.startswith("/")))
    folders = [*wheels, *(Path(f) for f in table.folders if f.startswith("/"))]
    return Library(table, libraries.load(table.label, table.files, folders))


class Library:
    """An opened library; `open_library` makes the one of this process."""

    def __init__(self, table: Table, library: ctypes.CDLL) -> None:
        self.table, self._library = table, library
        own = _NVIDIA_CALLS if table.vendor == "nvidia" else _AMD_CALLS
        self.calls = {name: self._bind(name, types) for name, types in {**_CALLS, **own}.items()}
        self.extension = CppExtension(library, self.error) if table.vendor == "amd" else None
        self._handles: dict[int, c_void_p] = {}
        self.result_type = result_type(table.algo_bytes)

    def _bind(self, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
        symbol = self.table.prefix + name
        try:
            call = self._library[symbol]
        except AttributeError:
            raise UnavailableError(
                f"{self._library._name} has no {symbol}; a newer {self.table.label} is needed"
            ) from None
        call.argtypes, call.restype = types, c_int

        def check(status: Any, *_: Any) -> Any:
            if status:
                raise self.error(symbol, status)
            return status

        call.errcheck = check
        checked: Callable[..., int] = call
        return checked

    def unchecked(self, name: str) -> Callable[..., int]:
        """Return a call that returns its status, whose arguments must be objects of `ctypes` of the right types."""
        call: Callable[..., int] = self._library[self.table.prefix + name]
        return call

    def error(self, call: str, status: int) -> DriverError:
        """Make the exception for a status other than success."""
        name = self.table.statuses.get(status, "")
        if self.table.vendor == "nvidia":
            lookup = self._library.cublasLtGetStatusName
            lookup.argtypes, lookup.restype = (c_int,), c_char_p
            name = (lookup(status) or b"").decode(errors="replace")
        return DriverError(call, status, name or "unknown status")

    def handle(self, device: int) -> c_void_p:
        """Return the library's context on the current device, whose ordinal is `device`; it is made once."""
        if device not in self._handles:
            handle = c_void_p()
            self.calls["Create"](byref(handle))
            self._handles[device] = handle
        return self._handles[device]

    def version(self, device: int = 0) -> int:
        """Return a version: equal numbers mean equal solution indices; hipBLASLt's has its git revision in it."""
        if self.table.vendor == "nvidia":
            get = self._library.cublasLtGetVersion
            get.argtypes, get.restype = (), c_size_t
            return int(get())
        number, revision = c_int(), ctypes.create_string_buffer(256)
        self.calls["GetVersion"](self.handle(device), byref(number))
        self.calls["GetGitRevision"](self.handle(device), revision)
        digits = "".join(c for c in revision.value.decode(errors="replace")[:8] if c in "0123456789abcdef")
        return (number.value << 32) + int(digits or "0", 16)

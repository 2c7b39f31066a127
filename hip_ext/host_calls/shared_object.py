"""Prepares host calls, functions of a compiled library that queue kernels on a stream, to be called repeatedly."""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tritongemm.core.errors import DriverError, UnavailableError
from tritongemm.core.launch import HostLaunch
from tritongemm.hip_ext.libraries import load_kept

_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
C_TYPES = {"pointer": "void*", "i32": "int32_t", "u32": "uint32_t", "i64": "int64_t", "f32": "float"}


@cache
def _library(path: str, sha256: str, runtime: str) -> ctypes.CDLL:
    """Open a library that stays open, as what it queued, and graphs of that, hold its code."""
    try:
        if runtime:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UnavailableError(f"{path} does not load: {error}") from None
    return load_kept(path, sha256)


class PreparedCall:
    """A host call with its arguments, of which pointers can be replaced between calls."""

    def __init__(self, call: HostLaunch, addresses: Mapping[str, int]) -> None:
        library = _library(call.path, call.sha256, call.runtime)
        self._symbol = call.symbol
        try:
            self._function: Callable[..., int] = getattr(library, call.symbol)
            self._message: Callable[[int], bytes | None] = library.message
        except AttributeError as error:
            raise DriverError("dlsym", 1, "SYMBOL_NOT_FOUND", f"{call.path}: {error}") from None
        self._message.restype = ctypes.c_char_p
        self._arguments = [
            _TYPES[p.kind](addresses.get(str(p.value), 0) if p.kind == "pointer" else p.value) for p in call.params
        ]
        self._at = {str(p.value): a for p, a in zip(call.params, self._arguments, strict=True) if p.kind == "pointer"}
        self._stream = self._at["stream"]

    def setter(self, name: str) -> Callable[[int], None]:
        """Return the setter of a buffer's address, which does nothing if the function does not take the buffer."""
        argument = self._at.get(name)

        def put(address: int) -> None:
            if argument is not None:
                argument.value = address

        return put

    def launch(self, stream: int) -> None:
        """Queue the kernels on a stream; a DriverError has the message of a function that refuses, or a kernel's."""
        self._stream.value = stream
        code = self._function(*self._arguments)
        if code:
            text = (self._message(code) or b"").decode(errors="replace")
            name = "REFUSED" if code < 0 else text.upper().replace(" ", "_") or "ERROR"
            raise DriverError(self._symbol, code, name, text)

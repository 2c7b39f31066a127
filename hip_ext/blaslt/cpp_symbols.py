"""hipBLASLt's C++ entry points that can be called from C: all solutions, their names, and whether one fits.

`hipblaslt_ext` is C++ without a C side. Its free functions take plain values, references and std::vector, so they are
called by their mangled names (Itanium ABI, libstdc++): getAllAlgos, getAlgosFromIndex, matmulIsAlgoSupported,
getIndexFromAlgo's result (the first word of the algorithm), getSolutionNameFromAlgo and getKernelNameFromAlgo. Not
reachable from C: the classes Gemm and GroupedGemm, and with them GemmTuning (a solution's split-K and work-group
mapping chosen at run time). A library that lacks a name, and a machine other than x86-64 (strings come back through a
register that ctypes can't set elsewhere), is asked through the heuristics alone.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from typing import Any

from tritongemm.core.errors import DriverError
from tritongemm.hip_ext.blaslt.tables import AMD, Matmul, Table, result_type

ALGO_BYTES = AMD.algo_bytes
_GEMM = 1  # GemmType::HIPBLASLT_GEMM
_NS = "_ZN13hipblaslt_ext"
_ALGO, _RESULT = "R22_hipblasLtMatmulAlgo_t", "I33_hipblasLtMatmulHeuristicResult_tSaI"
_LAYOUT = "P29hipblasLtMatrixLayoutOpaque_t"
_SYMBOLS = {
    "all": f"{_NS}11getAllAlgosEPvNS_8GemmTypeE18hipblasOperation_tS2_11hipDataTypeS3_S3_S3_20hipblasComputeType_t"
    f"RSt6vector{_RESULT}S6_EE",
    "from_index": f"{_NS}17getAlgosFromIndexEPvRSt6vectorIiSaIiEERS1_{_RESULT}S5_EE",
    "supported": f"{_NS}21matmulIsAlgoSupportedEPvP27hipblasLtMatmulDescOpaque_tPKv{_LAYOUT}S6_S4_S6_S6_{_ALGO}Rm",
    "solution_name": f"{_NS}23getSolutionNameFromAlgoB5cxx11EPv{_ALGO}",
    "kernel_name": f"{_NS}21getKernelNameFromAlgoB5cxx11EPv{_ALGO}",
}


class _Vector(ctypes.Structure):
    """The layout of libstdc++'s std::vector; all zero is an empty one."""

    _fields_ = [("begin", c_void_p), ("end", c_void_p), ("limit", c_void_p)]


class _String(ctypes.Structure):
    """The layout of libstdc++'s std::string (C++11 ABI)."""

    _fields_ = [("data", c_void_p), ("size", c_size_t), ("local", ctypes.c_char * 16)]


class CppExtension:
    """The C++ functions of one opened library."""

    def __init__(self, library: ctypes.CDLL, error: Callable[[str, int], DriverError]) -> None:
        self._error = error
        self._functions: dict[str, Any] = {}
        self._delete: Any = None
        if platform.machine() not in ("x86_64", "AMD64"):
            return
        try:
            self._delete = ctypes.CDLL("libstdc++.so.6")["_ZdlPv"]
        except (OSError, AttributeError):
            return
        self._delete.argtypes, self._delete.restype = (c_void_p,), None
        for role, symbol in _SYMBOLS.items():
            try:
                self._functions[role] = library[symbol]
            except AttributeError:
                continue

    @property
    def roles(self) -> frozenset[str]:
        """Which of ``all``, ``from_index``, ``supported``, ``solution_name`` and ``kernel_name`` the library has."""
        return frozenset(self._functions)

    def _call(self, role: str, *args: Any) -> None:
        status = self._functions[role](*args)
        if status:
            raise self._error(f"hipblaslt_ext::{role}", status)

    def _take_algorithms(self, vector: _Vector) -> list[bytes]:
        """Return the algorithms in a vector that the library filled, and free it."""
        if not vector.begin:
            return []
        try:
            result = result_type(ALGO_BYTES)
            count = (vector.end - vector.begin) // ctypes.sizeof(result)
            return [bytes(r.algo) for r in (result * count).from_address(vector.begin)]
        finally:
            self._delete(vector.begin)

    def _fit(
        self, handle: c_void_p, desc: c_void_p, layouts: Sequence[c_void_p], raw: bytes, scale: str
    ) -> tuple[bytes, int] | None:
        """Return an algorithm initialised for the problem and its bytes of workspace, or None where it does not fit."""
        algo, need = (ctypes.c_ubyte * ALGO_BYTES).from_buffer_copy(raw), c_size_t()
        number = c_int if scale == "int32" else c_float
        one, zero = number(1), number(0)
        a, b, c, d = layouts
        call = self._functions["supported"]
        status = call(handle, desc, byref(one), a, b, byref(zero), c, d, byref(algo), byref(need))
        return None if status else (bytes(algo), need.value)

    def supported_algorithms(
        self, handle: c_void_p, desc: c_void_p, layouts: Sequence[c_void_p], matmul: Matmul, table: Table
    ) -> Iterator[tuple[bytes, int]]:
        """Yield every solution that fits the problem, with its bytes of workspace; none if the calls are missing."""
        if not {"all", "supported"} <= self.roles:
            return
        vector = _Vector()
        operations = [table.operations[t] for t in matmul.trans]
        types = [table.types[m.dtype] for m in (matmul.a, matmul.b, matmul.c, matmul.d)]
        # the vector may hold something when the call fails; a failure here means no solution for these types
        status = self._functions["all"](
            handle, _GEMM, *operations, *types, table.compute[matmul.compute], byref(vector)
        )
        for raw in self._take_algorithms(vector) if not status else ():
            found = self._fit(handle, desc, layouts, raw, matmul.scale)
            if found:
                yield found

    def algorithm_by_index(
        self, handle: c_void_p, desc: c_void_p, layouts: Sequence[c_void_p], matmul: Matmul, solution: int
    ) -> tuple[bytes, int] | None:
        """Return the solution of an index and its bytes of workspace, or None where it does not fit."""
        if not {"from_index", "supported"} <= self.roles:
            return None
        wanted, vector = c_int(solution), _Vector()
        start = ctypes.addressof(wanted)
        self._call("from_index", handle, byref(_Vector(start, start + 4, start + 4)), byref(vector))
        for raw in self._take_algorithms(vector):
            return self._fit(handle, desc, layouts, raw, matmul.scale)
        return None

    def kernel_name(self, handle: c_void_p, raw: bytes) -> str:
        """Return the kernel's name, or the solution's, or "" where the library does not say."""
        algo = (ctypes.c_ubyte * ALGO_BYTES).from_buffer_copy(raw)
        for role in ("kernel_name", "solution_name"):
            if role not in self._functions:
                continue
            text, call = _String(), self._functions[role]
            call.restype = c_void_p
            # a string comes back in memory whose address goes in first
            call(byref(text), handle, byref(algo))
            if not text.data:
                continue
            found = ctypes.string_at(text.data, text.size).decode(errors="replace")
            if text.data != ctypes.addressof(text) + _String.local.offset:
                self._delete(text.data)
            if found:
                return found
        return ""

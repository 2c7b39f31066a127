"""Prepares a matmul on one device: its descriptors, the library's algorithms for it, and their launches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cached_property, partial
from typing import Any

from tritongemm.core.errors import DriverError
from tritongemm.hip_ext.blaslt.library import Library
from tritongemm.hip_ext.blaslt.tables import ATTRIBUTES, EPILOGUE_BIAS, REFUSALS, Algorithm, Matmul, Matrix


class PreparedMatmul:
    """A Matmul prepared on one device, the current one: descriptors, algorithms and launches.

    `workspace` is the most bytes an algorithm may need, `requested` how many the heuristics are asked for.
    """

    def __init__(self, library: Library, matmul: Matmul, device: int, workspace: int, requested: int) -> None:
        self.library, self.matmul, self._table = library, matmul, library.table
        self.workspace, self._requested = workspace, requested
        self._handle = library.handle(device)
        self._desc = self._make("MatmulDesc", self._table.compute[matmul.compute], self._table.types[matmul.scale])
        self._layouts = [self._layout(m) for m in (matmul.a, matmul.b, matmul.c, matmul.d)]
        number = c_int32 if matmul.scale == "int32" else c_float
        self._one, self._zero = number(1), number(0)
        self._scales: dict[str, int] = {}  # addresses that `move_scale` has put into the descriptor
        self._rebuilt: dict[tuple[tuple[str, int], ...], Algorithm | None] = {}
        self._describe()

    def _make(self, kind: str, *args: Any) -> c_void_p:
        made, calls = c_void_p(), self.library.calls
        calls[f"{kind}Create"](byref(made), *args)
        weakref.finalize(self, calls[f"{kind}Destroy"], made).atexit = False
        return made

    def _set(self, kind: str, made: c_void_p, attribute: int, value: Any) -> None:
        self.library.calls[f"{kind}SetAttribute"](made, attribute, byref(value), ctypes.sizeof(value))

    def _layout(self, matrix: Matrix) -> c_void_p:
        made = self._make("MatrixLayout", self._table.types[matrix.dtype], matrix.rows, matrix.cols, matrix.ld)
        if matrix.batch != 1:
            self._set("MatrixLayout", made, self._table.layout["batch_count"], c_int32(matrix.batch))
            self._set("MatrixLayout", made, self._table.layout["batch_offset"], c_int64(matrix.stride))
        return made

    def _describe(self) -> None:
        matmul, table = self.matmul, self._table
        values: dict[str, Any] = {
            "trans_a": c_int32(table.operations[matmul.trans[0]]),
            "trans_b": c_int32(table.operations[matmul.trans[1]]),
        }
        if matmul.bias:
            values["epilogue"] = c_int32(EPILOGUE_BIAS)
            values["bias"] = c_uint64(matmul.bias)
            values["bias_type"] = c_int32(table.types[matmul.bias_dtype])
        for which, address in zip("abd", matmul.scales, strict=True):
            if address:
                values[f"scale_{which}"] = c_uint64(address)
        for which, mode in zip("ab", matmul.scale_modes, strict=True):
            if mode != "scalar":
                values[f"scale_mode_{which}"] = c_int32(table.scale_modes[mode])
        if matmul.fast:
            values["fast_accumulation"] = ctypes.c_int8(1)
        for name, value in values.items():
            self._set("MatmulDesc", self._desc, table.desc[name], value)

    @cached_property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Return the library's algorithms within the workspace, its best guess first, without duplicates."""
        found: dict[tuple[tuple[str, int], ...], Algorithm] = {}
        for algorithm in self.heuristics(self.workspace):
            found.setdefault(algorithm.values, algorithm)
        if self.library.extension is not None:
            for raw, need in self.library.extension.supported_algorithms(
                self._handle, self._desc, self._layouts, self.matmul, self._table
            ):
                algorithm = self._algorithm(raw, need)
                if need <= self.workspace:
                    found.setdefault(algorithm.values, algorithm)
        return tuple(found.values())

    def heuristics(self, workspace: int, reductions: int | None = None) -> list[Algorithm]:
        """Return the algorithms that the library's heuristics choose, its best guess first.

        Each needs at most `workspace` bytes. `reductions` are allowed ways to sum up split-K, as bits (cuBLASLt); None:
        all.
        """
        preference, count = self._make("MatmulPreference"), c_int()
        numbers = self._table.preference
        self._set("MatmulPreference", preference, numbers["workspace"], c_uint64(workspace))
        if reductions is not None:
            self._set("MatmulPreference", preference, numbers["reduction_mask"], ctypes.c_uint32(reductions))
        for which in "abcd":
            if f"alignment_{which}" in numbers:
                value = ctypes.c_uint32(self.matmul.alignment)
                self._set("MatmulPreference", preference, numbers[f"alignment_{which}"], value)
        results = (self.library.result_type * self._requested)()
        try:
            self.library.calls["MatmulAlgoGetHeuristic"](
                self._handle, self._desc, *self._layouts, preference, self._requested, results, byref(count)
            )
        except DriverError as error:
            if any(word in error.name for word in REFUSALS):
                return []
            raise
        good = [r for r in results[: count.value] if not r.status and r.workspace <= workspace]
        return [self._algorithm(bytes(r.algo), r.workspace) for r in good]

    def _algorithm(self, raw: bytes, workspace: int) -> Algorithm:
        if self.library.extension is not None:
            name = self.library.extension.kernel_name(self._handle, raw)
            return Algorithm(raw, workspace, (("solution", int.from_bytes(raw[:4], "little")),), name)
        values, get = [], self.library.calls["MatmulAlgoConfigGetAttribute"]
        for name, (attribute, size) in ATTRIBUTES.items():
            value = c_uint64(0)
            get(raw, attribute, byref(value), size, byref(c_size_t()))
            values.append((name, value.value))
        return Algorithm(raw, workspace, tuple(values))

    def rebuild(self, values: Mapping[str, int]) -> Algorithm | None:
        """Return the algorithm of these values, if the library supports it here; None otherwise."""
        key = tuple(sorted(values.items()))
        if key not in self._rebuilt:
            self._rebuilt[key] = self._rebuild(values)
        return self._rebuilt[key]

    def _rebuild(self, values: Mapping[str, int]) -> Algorithm | None:
        try:
            if self.library.extension is not None:
                found = self.library.extension.algorithm_by_index(
                    self._handle, self._desc, self._layouts, self.matmul, values["solution"]
                )
                algorithm = self._algorithm(*found) if found else None
            else:
                algorithm = self._from_attributes(values)
        except DriverError as error:
            if any(word in error.name for word in REFUSALS):
                return None
            raise
        return algorithm if algorithm is not None and algorithm.workspace <= self.workspace else None

    def _from_attributes(self, values: Mapping[str, int]) -> Algorithm:
        calls, raw = self.library.calls, ctypes.create_string_buffer(self._table.algo_bytes)
        matmul, types = self.matmul, self._table.types
        kinds = [self._table.compute[matmul.compute], types[matmul.scale]]
        kinds += [types[m.dtype] for m in (matmul.a, matmul.b, matmul.c, matmul.d)]
        calls["MatmulAlgoInit"](self._handle, *kinds, values["algo"], raw)
        for name, (attribute, size) in ATTRIBUTES.items():
            if name != "algo" and name in values:
                calls["MatmulAlgoConfigSetAttribute"](raw, attribute, byref(c_uint64(values[name])), size)
        result = self.library.result_type()
        calls["MatmulAlgoCheck"](self._handle, self._desc, *self._layouts, raw, byref(result))
        return self._algorithm(raw.raw, result.workspace)

    def prepare(
        self, algorithm: Algorithm, a: int, b: int, c: int, d: int, add: bool = False
    ) -> Callable[[int, int], None]:
        """Return a function of the workspace's address and a stream that queues the product on these addresses.

        That of C may be D's, or 0 where C is not added and cuBLASLt runs. With `add` D = op(A) op(B) + C, else op(A)
        op(B).
        """
        call = self.moving(algorithm, add)
        for name, address in zip("abcd", (a, b, c, d), strict=True):
            call.put(name)(address)

        def launch(workspace: int, stream: int) -> None:
            call.put("workspace")(workspace)
            call.launch(stream)

        return launch

    def moving(self, algorithm: Algorithm, add: bool = False) -> MovingMatmul:
        """Return a call whose operands may have other addresses each time."""
        handles = [self._handle, self._desc, *self._layouts]
        return MovingMatmul(self, handles, algorithm, self._one, self._one if add else self._zero)

    def move_bias(self, address: int) -> None:
        """Replace the address of the bias."""
        self._set("MatmulDesc", self._desc, self._table.desc["bias"], c_uint64(address))

    def move_scale(self, which: str, address: int) -> None:
        """Replace the address of the scale factors of ``a`` or ``b``."""
        if self._scales.get(which) != address:
            self._set("MatmulDesc", self._desc, self._table.desc[f"scale_{which}"], c_uint64(address))
            self._scales[which] = address


class MovingMatmul:
    """A call of the library whose addresses are replaced; belongs to one thread.

    Its arguments are made once and in C's own types: to convert sixteen of them anew takes 1 to 2 us of a call's 9.
    """

    __slots__ = ("_args", "_call", "_cells", "_error", "_kept", "_stream")

    def __init__(
        self,
        plan: PreparedMatmul,
        handles: Sequence[c_void_p],
        algorithm: Algorithm,
        alpha: c_float | c_int32,
        beta: c_float | c_int32,
    ) -> None:
        library = plan.library
        self._call = library.unchecked("Matmul")
        self._error = partial(library.error, f"{library.table.prefix}Matmul")
        raw = ctypes.create_string_buffer(algorithm.raw, len(algorithm.raw))
        self._kept = plan, alpha, beta, raw
        one, factor, algo = (c_void_p(ctypes.addressof(x)) for x in (alpha, beta, raw))
        a, b, c, d, workspace = (c_void_p() for _ in range(5))
        self._cells = {"a": a, "b": b, "c": c, "d": d, "workspace": workspace}
        self._stream, need = c_void_p(), c_size_t(algorithm.workspace)
        handle, desc, la, lb, lc, ld = handles
        operands = (a, la, b, lb, factor, c, lc, d, ld)
        self._args = (handle, desc, one, *operands, algo, workspace, need, self._stream)

    def put(self, name: str) -> Callable[[int], None]:
        """Return the setter of the address of ``a``, ``b``, ``c``, ``d`` or ``workspace``; 0 is none."""
        return partial(setattr, self._cells[name], "value")

    def launch(self, stream: int) -> None:
        """Queue the product on the stream of a handle."""
        self._stream.value = stream
        code = self._call(*self._args)
        if code:
            raise self._error(code)

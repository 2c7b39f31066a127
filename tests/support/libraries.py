"""Shared by tests: libraries of kernels that a stand-in of a driver computes on the CPU."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tritongemm.core.config import Config
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.export.library import writing
from tritongemm.export.library.entry import LibraryEntry, LibraryKernel
from tritongemm.export.library.launch_table import LaunchTable, tabulate
from tritongemm.export.library.writing import Contents

TILE = Config("tile", 16, 32, 32, split_k=2, num_warps=4, num_stages=2)
TRITON = {"triton": "3.7.0"}  # which made and compiled them
UNITS = 132


def linear(m: int, n: int, k: int, dtype: str = "fp32") -> Problem:
    return Problem(m, n, k, *matrices(dtype, layout="TN"))


def tuned(problem: Problem, seconds: float = 2e-6, **changes: Any) -> Record:
    made = Record(problem, "sm90", TILE, "triton", seconds, 0.01, "events", toolchain=TRITON, compute_units=UNITS)
    return replace(made, library="torch", library_seconds=3e-6, **changes)


def launch_at(problem: Problem, m: int) -> Launch:
    """The launch of a kernel of three matrices and their sizes."""
    params = [Param("pointer", name) for name in "abc"] + [Param("i32", v) for v in (m, problem.n, problem.k)]
    grid = -(-m // TILE.block_m), -(-problem.n // TILE.block_n), 1
    return Launch("", "multiply", grid, (128, 1, 1), 0, tuple(params), (Buffer("workspace", 64 * grid[0]),))


def entry(record: Record, code: bytes, **changes: Any) -> LibraryEntry:
    launches = tabulate(partial(launch_at, record.problem), record.m_from or record.problem.m, record.problem.m, 16)
    assert isinstance(launches, LaunchTable)
    kernel = LibraryKernel(hashlib.sha256(code).hexdigest(), "cubin", len(code), "0" * 40, TRITON, False, launches)
    return LibraryEntry(record, replace(kernel, **changes))


def contents(*pairs: tuple[LibraryEntry, bytes]) -> Contents:
    readers: dict[str, Callable[[], bytes]] = {
        e.kernel.sha256: partial(bytes, code) for e, code in pairs if e.kernel is not None
    }
    return Contents({e.key: e for e, _ in pairs}, readers)


def write(path: Path, *records: Record) -> list[LibraryEntry]:
    """Write a library of kernels of these results, each of a code of its own."""
    pairs = [(entry(r, code), code) for r, code in ((r, f"code of {r.problem.key}".encode()) for r in records)]
    with writing.held(path):
        writing.write(path, contents(*pairs))
    return [one for one, _ in pairs]


def all_launches(table: LaunchTable) -> Iterable[Launch | Support]:
    """The launches of a table, in the order of their M."""
    return map(table.at, range(table.low, table.high + 1))

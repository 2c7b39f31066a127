"""Shared by tests: problems and records of linear layers."""

from __future__ import annotations

from dataclasses import replace

from tritongemm.core import settings
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record

TILE = Config("tile", 16, 32, 32, split_k=2, num_warps=4, num_stages=2)


def problem(m: int, n: int, k: int, bias: str = "none", dtype: str = "bf16") -> Problem:
    return Problem(m, n, k, dtype, dtype, dtype, row_major_b=False, bias=bias)


def record(of: Problem, config: Config = TILE, **changes: object) -> Record:
    toolchain = {"triton": settings.version("triton")}
    made = Record(of, "sm90", config, "triton", 2e-6, 0.01, "events", toolchain=toolchain, library="torch")
    return replace(made, library_seconds=3e-6, **changes)

"""Kernel source: float32 products of one column, computed by numpy in the host's memory."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tritongemm.core.problem import Problem
from tritongemm.core.served_call import CallSignature, PatchedLaunch, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import KernelSource


class NumpyKernel:
    """A loaded kernel: prepared once for each thread, then given the addresses of each call and launched."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def bytes(self, buffer: str) -> int:
        """None, as it shares no memory between its programs."""
        return 0

    def prepare(self, device: Any) -> PatchedLaunch:
        """A launch for one thread."""
        m, k = self.problem.m, self.problem.k
        addresses = dict.fromkeys("abc", 0)

        def matrix(name: str, rows: int, columns: int) -> Any:
            memory = (ctypes.c_float * (rows * columns)).from_address(addresses[name])
            return np.ctypeslib.as_array(memory).reshape(rows, columns)

        def launch(stream: int) -> None:
            matrix("c", m, 1)[:] = matrix("a", m, k) @ matrix("b", k, 1)

        return PatchedLaunch({name: partial(addresses.__setitem__, name) for name in addresses}, launch)


class NumpySource(KernelSource):
    """Products of one column."""

    rank: ClassVar[int] = 5  # It is asked before the tuned records are.

    def resolve(self, call: CallSignature, device: Any) -> Resolution | Support:
        """The kernel of a product that it can compute."""
        p = call.problem
        if (p.n, p.dtypes, p.bias) != (1, "fp32", "none"):
            return Support("numpy computes float32 products of one column")
        return Resolution("exact", f"{p.key} by numpy", NumpyKernel(p))

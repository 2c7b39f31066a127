"""Kernels that another toolchain tuned, or that a library loads late, are run before they serve."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.linear_layers import run_on_cpu, stand_in_device
from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.served_call import PatchedLaunch
from tritongemm.serving.stored_kernels import check_kernel

SIZE = Problem(8, 16, 32, *matrices("fp32"))
RECORD = Record(SIZE, "sm90", Config("tile", 16, 16, 16), "triton", 1e-6, 0.0, "events", error=1e-7, tolerance=1e-3)
DEVICE = stand_in_device()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)


class OnHost:
    """A kernel that computes with numpy, `off` beside the truth."""

    def __init__(self, off: float) -> None:
        self.off, self.launches = off, 0

    def bytes(self, buffer: str) -> int:
        return 0

    def prepare(self, device: Any) -> PatchedLaunch:
        at = dict.fromkeys("abc", 0)

        def array(name: str, rows: int, columns: int) -> Any:
            kind = ctypes.c_float * (rows * columns)
            return np.ctypeslib.as_array(kind.from_address(at[name])).reshape(rows, columns)

        def launch(stream: int) -> None:
            self.launches += 1
            if self.off == float("inf"):
                raise DriverError("launch", 1, "REFUSED", "not on Mondays")
            product = array("a", SIZE.m, SIZE.k) @ array("b", SIZE.k, SIZE.n)
            array("c", SIZE.m, SIZE.n)[:] = product + self.off

        return PatchedLaunch({n: lambda address, n=n: at.__setitem__(n, address) for n in at}, launch)  # type: ignore[misc]


def test_what_serves_and_what_does_not() -> None:
    right = OnHost(0.0)
    assert check_kernel(right, RECORD, DEVICE) and right.launches == 2
    assert "wrong with Triton " in check_kernel(OnHost(9.0), RECORD, DEVICE).reason
    assert "not on Mondays" in check_kernel(OnHost(float("inf")), RECORD, DEVICE).reason


def test_what_was_accepted_with_an_error_ratio_still_serves() -> None:
    """Its error was beyond the tolerance, in few elements; it must not have grown."""
    off = 0.1
    assert not check_kernel(OnHost(off), RECORD, DEVICE)
    accepted = replace(RECORD, error=0.1)
    assert check_kernel(OnHost(off), accepted, DEVICE)
    assert not check_kernel(OnHost(10 * off), accepted, DEVICE)

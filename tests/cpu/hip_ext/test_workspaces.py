"""Workspaces and counters: no one shares them, and counters start as zeros."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.linear_layers import StandInDriver
from tritongemm.hip_ext.driver.driver import Driver
from tritongemm.hip_ext.launching import workspaces
from tritongemm.hip_ext.launching.workspaces import WorkspacePool

StartDriver = Callable[[str], tuple[ctypes.CDLL, Driver]]


def test_no_two_streams_or_captures_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = StandInDriver()
    capture = 0
    monkeypatch.setattr(workspaces, "capture_id", lambda api, stream: capture)
    pool = WorkspacePool(device, 1000, 300)
    assert pool.counter_bytes == 512 and pool.holds(1000, 512) and not pool.holds(1001, 1) and not pool.holds(1, 513)
    first, second = pool.for_stream(1), pool.for_stream(2)
    assert first is pool.for_stream(1) and abs(first[0] - second[0]) >= 1000 and abs(first[1] - second[1]) >= 512
    seen: set[int | None] = {first[1], second[1]}
    for capture in (7, 8):  # noqa: B007 (read by the stand-in)
        seen |= {pool.for_capture(1), pool.for_capture(2)}
        assert pool.for_capture(1) in seen
    assert len(seen) == 6 and len(device.allocated) == 3
    while pool._free:
        capture += 1
        pool.for_capture(1)
    capture += 1
    assert pool.for_capture(1) is None and len(device.allocated) == 3
    assert pool.for_stream(3)[1] not in seen and len(device.allocated) == 5


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_counters_start_as_zeros(stand_in_driver: StartDriver, vendor: str) -> None:
    library, opened = stand_in_driver(vendor)
    device = opened.device()
    pool = WorkspacePool(device, 1000, 300)
    pairs = [pool.for_stream(stream) for stream in range(20)]  # more than are made at once
    assert len({address for pair in pairs for address in pair}) == 40
    assert all(ctypes.string_at(counters, pool.counter_bytes) == bytes(pool.counter_bytes) for _, counters in pairs)
    assert ctypes.c_int.in_dll(library, "fake_mode").value == 0
    assert ctypes.c_void_p.in_dll(library, "fake_last_stream").value, "not the stream that waits for all others"

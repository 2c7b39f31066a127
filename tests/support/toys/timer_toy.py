"""Timer: a toy, which reads the host's clock around a replay and waits for the device."""

from __future__ import annotations

import time

from tritongemm.hip_ext.driver.driver import Device, Graph
from tritongemm.plugins.contracts import Timer


class HostTimer(Timer):
    """The host's clock, which needs nothing and counts the way to the device as well."""

    label = "host-clock"
    counts_gaps = True

    def clock(self, device: Device, stream: int) -> HostClock:
        """A clock for graphs that run on a stream of a device."""
        return HostClock(device, stream)


class HostClock:
    """Times replays of captured graphs."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device, self._stream = device, stream

    def time(self, graph: Graph, launches: int, symbol: str = "") -> float:
        """Seconds of one launch."""
        start = time.perf_counter()
        graph.launch(self._stream)
        self._device.synchronize()
        return (time.perf_counter() - start) / launches

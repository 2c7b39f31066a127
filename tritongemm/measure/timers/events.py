"""The timer that uses device events around a captured graph of launches, without the host's launch gaps."""

from __future__ import annotations

from tritongemm.hip_ext.driver.driver import Device, Graph
from tritongemm.plugins.contracts import Timer


class EventsTimer(Timer):
    """The driver's own events, which every device has."""

    label = "graph-events"
    counts_gaps = True

    def clock(self, device: Device, stream: int) -> EventsClock:
        """Return a clock with two events of its own."""
        return EventsClock(device, stream)


class EventsClock:
    """Times replays of captured graphs."""

    def __init__(self, device: Device, stream: int) -> None:
        self._stream = stream
        self._start, self._stop = device.event(), device.event()

    def time(self, graph: Graph, launches: int, symbol: str = "") -> float:
        """Return seconds of one launch, from one replay of `graph` with `launches` of them; `symbol` is ignored."""
        self._start.record(self._stream)
        graph.launch(self._stream)
        self._stop.record(self._stream)
        self._stop.synchronize()
        return self._start.elapsed_ms(self._stop) / 1e3 / launches

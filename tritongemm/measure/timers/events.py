"""Timer: device events around a captured graph of launches; the launch gaps of the host are not in it."""

from __future__ import annotations

from tritongemm.hip_ext.driver.driver import Device, Graph
from tritongemm.plugins.contracts import Timer


class EventsTimer(Timer):
    """The driver's own events, which every device has."""

    label = "graph-events"
    counts_gaps = True

    def clock(self, device: Device, stream: int) -> EventsClock:
        """A clock with two events of its own."""
        return EventsClock(device, stream)


class EventsClock:
    """Times replays of captured graphs.

    Args:
        device: whose events are used.
        stream: handle of the stream the graphs run on.
    """

    def __init__(self, device: Device, stream: int) -> None:
        self._stream = stream
        self._start, self._stop = device.event(), device.event()

    def time(self, graph: Graph, launches: int, symbol: str = "") -> float:
        """Seconds of one launch: one replay of `graph`, which holds `launches` of them; events know no `symbol`."""
        self._start.record(self._stream)
        graph.launch(self._stream)
        self._stop.record(self._stream)
        self._stop.synchronize()
        return self._start.elapsed_ms(self._stop) / 1e3 / launches

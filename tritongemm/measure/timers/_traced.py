"""The clock of the timers that read a profiler's kernel records.

The time of a replay is the time during which at least one of its kernels ran: the union of their intervals. For kernels
one after the other that is the sum of their durations; where consecutive launches overlap (programmatic dependent
launch), the shared part counts once. Gaps in which the device only waits for the next launch are not included.
"""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from tritongemm.hip_ext.driver.driver import Graph
from tritongemm.hip_ext.profilers.trace import KernelRecord, KernelTrace, KernelTracer, TraceError, busy_seconds


class TracedClock:
    """Times replays of captured graphs by the records of their kernels."""

    ATTEMPTS = 3  # traces that are taken at most, if each is refused
    RECORDS_TIMEOUT_SECONDS = 1.0  # how long a late record is waited for

    def __init__(self, tracer: KernelTracer, wait: Callable[[], object], stream: int) -> None:
        self._tracer, self._wait, self._stream = tracer, wait, stream
        self._kernels: WeakKeyDictionary[Graph, tuple[str, ...]] = WeakKeyDictionary()

    def time(self, graph: Graph, launches: int, symbol: str = "") -> float:
        """Return seconds of one launch, which dispatches the kernel `symbol` once, or a library's operation.

        The graph is replayed twice and the second replay is timed: profilers are slow to register a graph that they
        have not seen, and the device is then busy while the timed replay is queued. The kernels of a library's
        operation are read from the first replays and must stay the same. Records that are wrong in every attempt raise
        a TraceError.
        """
        for left in reversed(range(self.ATTEMPTS)):
            try:
                records = self._replay(graph, launches, symbol)
                break
            except TraceError as error:
                if not left:
                    raise TraceError(f"{error} (--profiler events does without a profiler)") from error
        return busy_seconds(records) / launches

    def _replay(self, graph: Graph, launches: int, symbol: str) -> Sequence[KernelRecord]:
        """Return the records of the timed replay in the order of launching."""
        known = (symbol,) * launches if symbol else self._kernels.get(graph)
        with KernelTrace(self._tracer, self._wait) as trace:
            for _ in range(2):
                graph.launch(self._stream)
        if known:
            return trace.records(known * 2, self.RECORDS_TIMEOUT_SECONDS)[len(known) :]
        records = trace.records(timeout=self.RECORDS_TIMEOUT_SECONDS)
        lead, timed = records[: len(records) // 2], records[len(records) // 2 :]
        names = tuple(r.name for r in timed)
        if not timed or len(timed) % launches or tuple(r.name for r in lead) != names:
            raise TraceError(
                f"kernel trace: two replays of {launches} launches gave {len(records)} records, which are not two "
                f"alike series of as many for each launch: {', '.join(sorted({r.name for r in records})) or 'none'}"
            )
        self._kernels[graph] = names
        return timed

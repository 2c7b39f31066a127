import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.nouns import apart, fails
from tests.support.timers import PROFILERS, Playback, poke, stand_in, traced
from tritongemm.hip_ext.profilers.cupti import CuptiTracer
from tritongemm.hip_ext.profilers.rocprofiler import RocprofilerTracer
from tritongemm.hip_ext.profilers.trace import KernelRecord, KernelTrace, TraceError


@dataclass(frozen=True)
class Traced:
    library: ctypes.CDLL  # its variables
    trace: Callable[[], KernelTrace]
    launch: Callable[[str, int, int, int], None]  # a kernel's name, its order, and when it started and ended
    counts_anew: bool  # dropped records, for each trace

    def traced(self, start: int = 2000, end: int = 2100, **poked: int) -> KernelTrace:
        with self.trace() as trace:
            self.launch("a", 1, start, end)
            for name, value in poked.items():
                poke(self.library, name, value)
        return trace


@pytest.fixture(params=PROFILERS)
def profiler(request: pytest.FixtureRequest, profilers: Path, tmp_path: Path) -> Traced:
    library = stand_in(request.param, profilers, tmp_path)
    tracer: Any = (CuptiTracer if request.param == "cupti" else RocprofilerTracer)(library)
    player = Playback(library, request.param)
    return Traced(library, lambda: traced(tracer), player.record, request.param == "cupti")


def test_records_come_in_launch_order_and_traces_do_not_nest(profiler: Traced) -> None:
    with profiler.trace() as trace:
        profiler.launch("second", 8, 3000, 3500)
        profiler.launch("first", 7, 2000, 2600)
    records = trace.records(["first", "second"])
    assert records == [KernelRecord("first", 2000, 2600), KernelRecord("second", 3000, 3500)]
    assert records[0].seconds == pytest.approx(600e-9) and trace.records(2) == trace.records() == records
    with profiler.trace() as trace:
        fails(TraceError, "after the with block", trace.records)
        with pytest.raises(TraceError, match="another one is open"), profiler.trace():
            pass
    with pytest.raises(ZeroDivisionError), profiler.trace():
        raise ZeroDivisionError
    assert len(profiler.traced().records(1)) == 1


@apart(
    (3, "3 launches, but 2 records"),
    (1, "1 launches, but 2 records"),
    (["a"], "1 launches, but 2 records"),
    (["a", "c"], "launch 1 was c, its record says b"),
    (["b", "a"], "launch 0 was b, its record says a"),
)
def test_records_of_other_launches_are_refused(expected: int | list[str], message: str, /, profiler: Traced) -> None:
    with profiler.trace() as trace:
        profiler.launch("a", 1, 2000, 2100)
        profiler.launch("b", 2, 2200, 2300)
    fails(TraceError, message, trace.records, expected, timeout=0.01)


def test_incomplete_records_spoil_their_trace_and_late_ones_are_waited_for(profiler: Traced) -> None:
    poke(profiler.library, "dropped", 5)
    fails(TraceError, "dropped 5 records", profiler.traced().records, 1)
    poke(profiler.library, "dropped", 0 if profiler.counts_anew else 5)  # or the count never goes back
    fails(TraceError, "1 records without a valid start and end", profiler.traced(end=0).records, 1)
    assert len(profiler.traced().records(1)) == 1 and len(profiler.traced(hold=3).records(1)) == 1
    fails(TraceError, "1 launches, but 0 records", profiler.traced(3000, 3100, hold=10_000).records, 1, timeout=0.02)
    poke(profiler.library, "time", 4000)
    with profiler.trace() as trace:  # still held back when this one starts
        poke(profiler.library, "hold", 0)
    fails(TraceError, "1 records of launches before this trace", trace.records)
    assert [r.start_ns for r in profiler.traced(5000, 5100).records(1)] == [5000]

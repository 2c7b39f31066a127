"""Defines what every kernel profiler delivers, and the checks that reject a wrong or stale figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from tritongemm.core.errors import TritonGemmError

_POLL_SECONDS = 1e-3


class TraceError(TritonGemmError):
    """Records are missing, dropped, late, or not those of the launches made."""


@dataclass(frozen=True)
class KernelRecord:
    """The record of one run of a kernel."""

    name: str  # its symbol; "" where the profiler does not know it
    # start_ns, end_ns: device time in nanoseconds
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The seconds that the kernel ran."""
        return (self.end_ns - self.start_ns) * 1e-9


def busy_seconds(records: Iterable[KernelRecord]) -> float:
    """Return the seconds in which at least one of the kernels ran: the union of their intervals."""
    busy = reached = 0
    for record in sorted(records, key=lambda r: r.start_ns):
        busy += max(0, record.end_ns - max(record.start_ns, reached))
        reached = max(reached, record.end_ns)
    return busy * 1e-9


class Collection:
    """Records of one trace, filled in by a profiler's callbacks on whatever thread it likes.

    What ended before `since_ns`, profiler time, is a leftover of an earlier trace.
    """

    def __init__(self, since_ns: int) -> None:
        self._since = since_ns
        self._until: int | None = None
        self._found: list[tuple[tuple[int, ...], KernelRecord]] = []
        self._faults: list[str] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, order: tuple[int, ...], record: KernelRecord) -> None:
        """Take a record; `order` sorts records into the order of launching."""
        if self._until is not None and record.start_ns > self._until:
            return
        self._found.append((order, record))

    def close(self, until_ns: int) -> None:
        """End the trace of a profiler that goes on: it waits for kernels that run, and takes none that start later."""
        self._until = until_ns

    def fail(self, reason: str) -> None:
        """Note why the trace can't be believed; `finish` raises it."""
        self._faults.append(reason)

    def finish(self, expected: int | Sequence[str] | None) -> list[KernelRecord]:
        """Return the records in launch order, checked against what was launched; see `KernelTrace.records`."""
        records = [record for _, record in sorted(self._found, key=lambda pair: pair[0])]
        late = sum(record.end_ns < self._since for record in records if record.end_ns)
        broken = sum(not 0 < record.start_ns <= record.end_ns for record in records)
        faults = list(self._faults)
        if late:
            faults.append(f"{late} records of launches before this trace arrived in it")
        if broken:
            faults.append(f"{broken} records without a valid start and end")
        names = None if expected is None or isinstance(expected, int) else list(expected)
        count = expected if isinstance(expected, int) else len(records) if names is None else len(names)
        if count != len(records):
            faults.append(f"{count} launches, but {len(records)} records")
        for index, (wanted, record) in enumerate(zip(names or (), records, strict=False)):
            if wanted and wanted != record.name:
                faults.append(f"launch {index} was {wanted}, its record says {record.name or 'nothing'}")
                break
        if faults:
            raise TraceError("kernel trace: " + "; ".join(faults))
        return records


class KernelTracer(Protocol):
    """A profiler, set up once for the process."""

    def start(self) -> Collection:
        """Begin a trace; its records come into the collection."""

    def stop(self) -> None:
        """End the trace, if one is open."""

    def flush(self) -> None:
        """Have the profiler deliver the records that it holds."""


class KernelTrace:
    """Context manager that times every kernel launched within it; `wait` waits for the device."""

    def __init__(self, tracer: KernelTracer, wait: Callable[[], object]) -> None:
        self._tracer, self._wait = tracer, wait
        self._collection: Collection | None = None
        self._open = False

    def __enter__(self) -> KernelTrace:
        self._wait()  # what already runs is not part of this trace
        self._collection, self._open = self._tracer.start(), True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open = False
        first: TritonGemmError | None = None
        for step in (self._wait, self._tracer.flush, self._tracer.stop):
            try:
                step()
            except TritonGemmError as fault:  # after a fault all of them fail; the first says why
                first = first or fault
        if first and error is None:
            raise first

    def records(self, expected: int | Sequence[str] | None = None, timeout: float = 1.0) -> list[KernelRecord]:
        """Return the kernels in the order of their launches, those that are still under way within `timeout` seconds.

        `expected` is how many were launched, or the symbol of each ("" for any).

        Raises:
            TraceError: a record is missing, dropped, incomplete, left over from before, or of another kernel.
        """
        if self._collection is None or self._open:
            raise TraceError("kernel trace: ask for records after the with block")
        count = 0 if expected is None else expected if isinstance(expected, int) else len(expected)
        deadline = time.monotonic() + timeout
        while len(self._collection) < count and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._tracer.flush()
        return self._collection.finish(expected)

"""What a report is made of: results, the journals of their runs, the calls of a workload, and facts of the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log
from typing import NamedTuple

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.results.history import History

# More would make the page slow in a browser, and nobody reads so many rows.
MOST_RECORDS = 5000
_MOST_PRODUCTS = 60  # rows of a figure


class MeasuredDevice(NamedTuple):
    """A kind of device that results were measured on.

    Attributes:
        arch: architecture.
        compute_units: how many it has; 0 where that is not said.
        product: what the driver calls it; "" where that is not said.
    """

    arch: str
    compute_units: int
    product: str

    @property
    def label(self) -> str:
        """The device's name as the page shows it, such as its product's name and its architecture."""
        units = f" with {self.compute_units} compute units" if self.compute_units else ""
        return f"{self.product} ({self.arch})" if self.product else self.arch + units


def device_of(record: Record) -> MeasuredDevice:
    """The device that a result was measured on."""
    return MeasuredDevice(record.target, record.compute_units, record.toolchain.get("device", ""))


@dataclass(frozen=True)
class ReportData:
    """What a report is made of.

    Attributes:
        records: results, one for each problem and device.
        histories: how the runs went, by the name of the journal.
        targets: facts of the devices; one that is not known has none.
        calls: how often a workload calls each problem; empty where no workload was named.
        sources: the files that were read.
        notes: what was left out and why, in whole sentences.
    """

    records: tuple[Record, ...]
    histories: Mapping[str, History] = field(default_factory=dict)
    targets: Mapping[MeasuredDevice, Target] = field(default_factory=dict)
    calls: Mapping[Problem, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def devices(self) -> tuple[MeasuredDevice, ...]:
        """What was measured on, in the order of the results."""
        return tuple(dict.fromkeys(device_of(record) for record in self.records))

    @cached_property
    def raced(self) -> tuple[Record, ...]:
        """The results that have a time of the library, in their order."""
        return tuple(record for record in self.records if record.library_seconds is not None)

    def name(self, record: Record) -> str:
        """A result's size, with its device where there are several."""
        return record.problem.key + self._at(record)

    def name_product(self, record: Record) -> str:
        """The same without its M: what a row of a figure is of."""
        return record.problem.key.split("x", 1)[1] + self._at(record)

    def _at(self, record: Record) -> str:
        return f" on {device_of(record).label}" if len(self.devices) > 1 else ""

    def busiest(self, records: Iterable[Record]) -> tuple[str, ...]:
        """Names of the products that take most time, as many as a figure has room for, in the order of N and K."""
        seconds: dict[tuple[int, int, str], float] = {}
        for record in records:
            product = (record.problem.n, record.problem.k, self.name_product(record))
            seconds[product] = seconds.get(product, 0.0) + self.weight(record) * record.served_seconds
        busiest = sorted(seconds, key=lambda product: -seconds[product])[:_MOST_PRODUCTS]
        return tuple(name for _, _, name in sorted(busiest))

    def longest(self, count: int) -> tuple[Record, ...]:
        """The `count` results whose calls take most time, the longest first."""
        ordered = sorted(self.records, key=lambda record: -self.weight(record) * record.served_seconds)
        return tuple(ordered[:count])

    def floor_seconds(self, record: Record) -> float | None:
        """The longer of the data sheet's roofline and the shortest kernel seen on the device; None if not known."""
        target, problem = self.targets.get(device_of(record)), record.problem
        if target is None:
            return None
        return max(target.roofline_seconds(problem.flops, problem.bytes, problem.a), target.launch_us * 1e-6)

    def weight(self, record: Record) -> float:
        """How often the workload calls it; once where no workload was named."""
        return self.calls.get(record.problem, 0.0) if self.calls else 1.0


class Uplift(NamedTuple):
    """What tuning gained over the library, as shares.

    Attributes:
        average: the mean of the ratios, less 1.
        geometric: their geometric mean, less 1.
        weighted: the share of the library's time that is saved, every size as often as it is called.
    """

    average: float
    geometric: float
    weighted: float


def uplift_of(data: ReportData) -> Uplift | None:
    """What was gained where the library raced; None where it did nowhere, or nothing of it is called."""
    called = [(record, data.weight(record)) for record in data.raced if data.weight(record) > 0]
    ratios = [served_ratio(record) for record, _ in called]
    theirs = sum(calls * (record.library_seconds or 0.0) for record, calls in called)
    if not theirs:
        return None
    ours = sum(calls * record.served_seconds for record, calls in called)
    geometric = exp(sum(log(ratio) for ratio in ratios) / len(ratios)) - 1
    return Uplift(sum(ratios) / len(ratios) - 1, geometric, 1 - ours / theirs)


def served_ratio(record: Record) -> float:
    """The library's time over that of what serves; 1 where the library does, or did not race."""
    return (record.library_seconds or record.served_seconds) / record.served_seconds

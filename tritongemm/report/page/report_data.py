"""Collects what a report needs: results, the journals of their runs, the calls of a workload, and device facts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log
from typing import NamedTuple

from tritongemm.core.format_row import FormatRow
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.results.history import History
from tritongemm.results.server_comparison import ServerComparison

# More rows would make the page slow in a browser.
MOST_RECORDS = 5000
_MOST_PRODUCTS = 60  # rows of a figure


class MeasuredDevice(NamedTuple):
    """A kind of device that results were measured on."""

    arch: str  # architecture
    compute_units: int  # how many it has; 0 where that is not said
    product: str  # what the driver calls it; "" where that is not said

    @property
    def label(self) -> str:
        """The device's name as the page shows it, such as its product's name and its architecture."""
        units = f" with {self.compute_units} compute units" if self.compute_units else ""
        return f"{self.product} ({self.arch})" if self.product else self.arch + units


def device_of(record: Record) -> MeasuredDevice:
    """Return the device that a result was measured on."""
    return MeasuredDevice(record.target, record.compute_units, record.toolchain.get("device", ""))


def name_product(result: Record | FormatRow) -> str:
    """Return a result's size without its M, which names a row of a figure."""
    return result.problem.key.split("x", 1)[1]


def served_sizes(record: Record, ordered: Sequence[int]) -> Sequence[int]:
    """Return those of some M, in rising order, that a result serves."""
    first = bisect_left(ordered, record.m_from or record.problem.m)
    return ordered[first : bisect_right(ordered, record.problem.m)]


@dataclass(frozen=True)
class ReportData:
    """The data of a report."""

    records: tuple[Record, ...]  # results, one for each problem and device
    histories: Mapping[str, History] = field(default_factory=dict)  # how the runs went, by the name of the journal
    # Facts of the devices; one that is not known has none.
    targets: Mapping[MeasuredDevice, Target] = field(default_factory=dict)
    # How often a workload calls each problem; empty where no workload was named.
    calls: Mapping[Problem, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()  # the files that were read
    notes: tuple[str, ...] = ()  # what was left out and why, in full sentences
    # The modules of a model that call a product, by its name, where the workload says them.
    layers: Mapping[str, str] = field(default_factory=dict)
    server: ServerComparison | None = None  # a server without and with these results; None where none was compared
    older: tuple[Record, ...] | None = None  # results that these are compared with; None for none

    @cached_property
    def devices(self) -> tuple[MeasuredDevice, ...]:
        """The devices of the results, in their order."""
        return tuple(dict.fromkeys(device_of(record) for record in self.records))

    @cached_property
    def raced(self) -> tuple[Record, ...]:
        """The results that have a time of the library, in their order."""
        return tuple(record for record in self.records if record.library_seconds is not None)

    def label(self, product: str) -> str:
        """Return the name of a product with the layers that call it, behind its N and K."""
        layers = self.layers.get(product)
        return product.replace("_", f"_{layers} ", 1) if layers else product

    def by_device(self) -> Iterator[tuple[MeasuredDevice, ReportData]]:
        """Yield each device with the data of its own results alone."""
        for device in self.devices:
            yield device, replace(self, records=tuple(r for r in self.records if device_of(r) == device))

    def busiest(self, records: Iterable[Record]) -> tuple[str, ...]:
        """Return the names of the products that take most time, as many as a figure shows, in the order of N and K."""
        seconds: dict[tuple[int, int, str], float] = {}
        for record in records:
            product = (record.problem.n, record.problem.k, name_product(record))
            seconds[product] = seconds.get(product, 0.0) + self.weight(record) * record.served_seconds
        busiest = sorted(seconds, key=lambda product: -seconds[product])[:_MOST_PRODUCTS]
        return tuple(name for _, _, name in sorted(busiest))

    def longest(self, count: int) -> tuple[Record, ...]:
        """Return the `count` results whose calls take most time, the longest first."""
        ordered = sorted(self.records, key=lambda record: -self.weight(record) * record.served_seconds)
        return tuple(ordered[:count])

    def floor_seconds(self, record: Record) -> float | None:
        """Return the longer of the roofline and the shortest kernel seen on the device; None if not known."""
        target, problem = self.targets.get(device_of(record)), record.problem
        if target is None:
            return None
        return max(target.roofline_seconds(problem.flops, problem.bytes, problem.a.type), target.launch_us * 1e-6)

    def weight(self, record: Record) -> float:
        """Return how often the workload calls what a result serves; once where no workload was named."""
        return self._served[0].get((record.problem, device_of(record)), 0.0) if self.calls else 1.0

    def predicted_gains(self, sizes: Iterable[int]) -> dict[int, float]:
        """Return, by M, the library's time over that of what serves, summed over the products that have both times.

        A product counts as often as it is called at any M. An M that no result says is left out, as are all where
        results are of several devices.
        """
        calls: dict[Problem, float] = {}
        for problem, count in self.calls.items():
            calls[problem.at(1)] = calls.get(problem.at(1), 0.0) + count
        serving: dict[int, dict[Problem, Record]] = {m: {} for m in sorted(sizes)} if len(self.devices) == 1 else {}
        ordered = list(serving)
        for r in sorted(self.raced, key=lambda r: r.m_from == 0):  # the row of an M goes before that of a range
            product = r.problem.at(1)
            for m in served_sizes(r, ordered):
                serving[m][product] = r
        gains = dict[int, float]()
        for m, rows in serving.items():
            weighed = [(r, calls.get(product, 0.0) if calls else 1.0) for product, r in rows.items()]
            if ours := sum(weight * r.served_seconds for r, weight in weighed):
                gains[m] = sum(weight * (r.library_seconds or 0.0) for r, weight in weighed) / ours
        return gains

    @property
    def unserved(self) -> tuple[Problem, ...]:
        """The workload's problems that no result serves."""
        return self._served[1]

    @cached_property
    def _served(self) -> tuple[Mapping[tuple[Problem, MeasuredDevice], float], tuple[Problem, ...]]:
        """Return the calls that each result serves, of its own M and its range, and the problems that none serves."""
        own = {(record.problem, device_of(record)) for record in self.records}
        ranges: defaultdict[tuple[Problem, MeasuredDevice], list[Record]] = defaultdict(list)
        for record in sorted(self.records, key=lambda r: r.problem.m):
            if record.m_from and not record.problem.masked:
                ranges[record.problem.at(1), device_of(record)].append(record)
        counts, unserved = dict[tuple[Problem, MeasuredDevice], float](), list[Problem]()
        for problem, calls in self.calls.items():
            serving = [(problem, device) for device in self.devices if (problem, device) in own]
            for device in self.devices:
                found = next((r for r in ranges.get((problem.at(1), device), ()) if r.serves(problem.m)), None)
                if found is not None and (problem, device) not in own:
                    serving.append((found.problem, device))
            for place in serving:
                counts[place] = counts.get(place, 0.0) + calls
            unserved += [] if serving else [problem]
        return counts, tuple(unserved)


class Uplift(NamedTuple):
    """What tuning gained over the library, as shares."""

    average: float  # the mean of the ratios, less 1
    geometric: float  # their geometric mean, less 1
    weighted: float  # the share of the library's time that is saved, every size as often as it is called


def uplift_of(data: ReportData) -> Uplift | None:
    """Return the gain where the library raced; None where it did nowhere, or nothing of it is called."""
    called = [(record, data.weight(record)) for record in data.raced if data.weight(record) > 0]
    ratios = [served_ratio(record) for record, _ in called]
    theirs = sum(calls * (record.library_seconds or 0.0) for record, calls in called)
    if not theirs:
        return None
    ours = sum(calls * record.served_seconds for record, calls in called)
    geometric = exp(sum(log(ratio) for ratio in ratios) / len(ratios)) - 1
    return Uplift(sum(ratios) / len(ratios) - 1, geometric, 1 - ours / theirs)


def served_ratio(record: Record) -> float:
    """Return the library's time over that of what serves; 1 where the library does, or did not race."""
    return (record.library_seconds or record.served_seconds) / record.served_seconds

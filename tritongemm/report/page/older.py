"""What changed from older results: which sizes became faster or slower, which are new or gone, and their sum."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritongemm.core.record import Record
from tritongemm.report.page.report_data import ReportData, device_of

_ALIKE = 0.02  # by how much two runs of one kernel differ without a reason
CHANGES = ("faster", "slower", "alike", "new", "gone")


@dataclass(frozen=True)
class Changed:
    """One size in old and new results."""

    change: str  # one of `CHANGES`
    calls: float  # how often the workload calls it
    # old, new: its results; None where there is none
    old: Record | None
    new: Record | None

    @property
    def record(self) -> Record:
        """The newest of its results."""
        found = self.new or self.old
        assert found is not None
        return found

    @property
    def saved_seconds(self) -> float:
        """Time that all its calls take less than before; 0 where it is new or gone."""
        return self.calls * (self.old.served_seconds - self.new.served_seconds) if self.old and self.new else 0.0


def changes(data: ReportData, older: Iterable[Record]) -> tuple[Changed, ...]:
    """Return every size of old and new results, those first whose calls' time changed most."""
    old = {(r.problem, device_of(r)): r for r in older}
    new = {(r.problem, device_of(r)): r for r in data.records}
    found = [
        Changed(
            _change(old.get(key), new.get(key)),
            data.weight(new[key]) if key in new else 0.0,
            old.get(key),
            new.get(key),
        )
        for key in dict.fromkeys((*new, *old))
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.saved_seconds)))


def _change(old: Record | None, new: Record | None) -> str:
    if old is None or new is None:
        return "gone" if new is None else "new"
    ratio = old.served_seconds / new.served_seconds
    if abs(ratio - 1) <= max(_ALIKE, old.spread + new.spread):
        return "alike"
    return "faster" if ratio > 1 else "slower"


def describe(found: Sequence[Changed]) -> str:
    """Return how many sizes changed how, and the time of all calls of those that are in both."""
    counts = Counter(one.change for one in found)
    both = [(one.calls, one.old, one.new) for one in found if one.old and one.new]
    before = sum(calls * old.served_seconds for calls, old, _ in both)
    after = sum(calls * new.served_seconds for calls, _, new in both)
    said = ", ".join(f"{counts[change]} {change}" for change in CHANGES)
    if not before:
        return f"{said}; no size that is called is in both"
    sums = f"{after * 1e3:.4g} ms instead of {before * 1e3:.4g} ms, {after / before - 1:+.1%}"
    return f"{said}; all calls of sizes in both take {sums}"

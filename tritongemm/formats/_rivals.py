"""What foreign formats ask of results: which of them are of one problem and device, and whether PyTorch itself won."""

from __future__ import annotations

from collections.abc import Iterable

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend


def by_device(records: Iterable[Record]) -> list[list[Record]]:
    """The results of each problem on each device: the best, then what may stand for it, as they are given."""
    found: dict[tuple[Problem, str, int], list[Record]] = {}
    for record in records:
        found.setdefault((record.problem, record.target, record.compute_units), []).append(record)
    return list(found.values())


def baseline_won(record: Record) -> bool:
    """Whether what users run today won, which other tools run by themselves."""
    return record.winner in registry.names(Backend) and registry.get(Backend, record.winner).baseline

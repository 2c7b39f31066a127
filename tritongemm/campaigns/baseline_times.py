"""Stores the times of the baseline in a journal, each on disk before the next is measured."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from tritongemm.core.record import SCHEMA
from tritongemm.results import journal


class BaselineTimes:
    """Seconds of one call by the key of a problem; threads may share it.

    Args:
        path: the journal; one that was measured otherwise is set aside.
        measured_with: what the times depend on.

    Raises:
        OutputError: it can't be written, or is another program's file.
    """

    def __init__(self, path: Path, measured_with: Mapping[str, str]) -> None:
        header = {"target": "", "toolchain": dict(measured_with), "protocol": {}, "schema": SCHEMA}
        self._journal, lines = journal.resume(path, header)
        self._times: dict[str, float | None] = dict(line.value for line in lines if line.kind == "baseline")
        self._guard = threading.Lock()

    def __contains__(self, key: object) -> bool:
        """Return whether a problem was measured, or is known not to be computed by the baseline."""
        return key in self._times

    def get(self, key: str) -> float | None:
        """Return the seconds of one call; None where they are not known."""
        return self._times.get(key)

    def add(self, key: str, seconds: float | None) -> None:
        """Store a time, or None where the baseline does not compute the problem.

        Raises:
            OutputError: it can't be written.
        """
        with self._guard:
            self._journal.append([{"baseline": {"problem": key, "seconds": seconds}}])
            self._times[key] = seconds

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

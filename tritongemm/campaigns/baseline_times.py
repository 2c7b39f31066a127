"""Stores the times of the baseline: a line of JSON each, on disk before the next is measured."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tritongemm.core.errors import OutputError
from tritongemm.core.values import SECONDS, TEXT
from tritongemm.system import files

_ADVICE = "make room and run the same command again, or choose another -o"
_HEAD = "baseline times of tritongemm"


class BaselineTimes:
    """Seconds of one call by the key of a problem; threads may share it.

    Args:
        path: the file; one that was measured otherwise, or is another kind of file, begins anew.
        measured_with: what the times depend on.
    """

    def __init__(self, path: Path, measured_with: Mapping[str, str]) -> None:
        self._path, self._head = path, {"what": _HEAD, "measured_with": dict(measured_with)}
        self._times: dict[str, float | None] = {}
        self._guard = threading.Lock()
        self._descriptor = -1

    def __enter__(self) -> BaselineTimes:
        files.check_place(self._path, _may_be_times, "a file of baseline times", _ADVICE)
        lines = self._lines()
        if not lines or lines[0] != self._head:
            files.atomic_write(self._path, json.dumps(self._head) + "\n", _ADVICE)
        for line in lines[1:] if lines and lines[0] == self._head else []:
            self._take(line)
        try:
            self._descriptor = files.open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise self._fault(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

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
        # A line begins with the end of the one before, which a kill may have cut.
        line = ("\n" + json.dumps({"problem": key, "seconds": seconds}) + "\n").encode()
        with self._guard:
            try:
                if os.write(self._descriptor, line) != len(line):
                    raise OutputError(f"{self._path} can't be written: no room is left; {_ADVICE}")
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._fault(error) from error
            self._times[key] = seconds

    def _lines(self) -> list[object]:
        """Return the values of the lines; damaged lines have none."""
        try:
            text = files.read_regular(self._path).decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._fault(error) from error
        found: list[object] = []
        for line in filter(None, text.splitlines()):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                found.append(None)
        return found

    def _take(self, line: object) -> None:
        if isinstance(line, dict):
            key, seconds = line.get("problem"), line.get("seconds")
            if TEXT.holds(key) and (seconds is None or SECONDS.holds(seconds)):
                self._times[str(key)] = None if seconds is None else float(str(seconds))

    def _fault(self, error: OSError) -> OutputError:
        return OutputError(f"{self._path} can't be written: {error.strerror}; {_ADVICE}")


def _may_be_times(start: bytes) -> bool:
    return not start or _HEAD.encode() in start

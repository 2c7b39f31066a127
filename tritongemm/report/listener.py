"""Reports a run that a Python program asked for: prints nothing but on a terminal, and calls back."""

import io
import sys
import threading
from collections.abc import Callable
from math import inf
from time import monotonic

from rich.console import Console

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.trial import Trial
from tritongemm.report.console import Reporter
from tritongemm.report.progress import RunProgress

_WIDTH = 240  # columns of tables that are not printed
_PERIOD_SECONDS = 1.0  # between two calls of the callback while no size is done


class Listener(Reporter):
    """Keeps what a run says, and reports its progress to a callback or, without one, to a terminal.

    The callback is called in the run's thread when a size is done, and about once a second; what it raises ends the
    run.
    """

    def __init__(self, callback: Callable[[RunProgress], object] | None = None, seconds: float = 0.0) -> None:
        self._tables = io.StringIO()
        super().__init__(console=Console(file=self._tables, width=_WIDTH, highlight=False), seconds=seconds)
        self.lines: list[str] = []
        self._callback, self._thread, self._called = callback, threading.get_ident(), -inf
        self._prints = callback is None and sys.stderr is not None and sys.stderr.isatty()

    @property
    def tables(self) -> str:
        """The text of the tables."""
        return self._tables.getvalue()

    def say(self, text: str) -> None:
        """Keep a line, and print it on a terminal."""
        self.lines.append(text)
        if self._prints:
            super().say(text)

    def stage(self, name: str, total: int) -> None:
        """Begin a stage, or make it longer by `total` steps."""
        if self._prints:
            super().stage(name, total)
        else:
            with self._lock:
                self._progress.stage(name, total)

    def finished(self, record: Record | None) -> None:
        """Count a size that has its result, or none."""
        super().finished(record)
        self._call_back(0.0)

    def trial(self, problem: Problem, trial: Trial) -> None:
        """Count a candidate's outcome."""
        super().trial(problem, trial)
        self._call_back(_PERIOD_SECONDS)

    def _print_progress(self) -> None:
        """Print no lines: the terminal has one that changes in place."""

    def _call_back(self, period: float) -> None:
        if self._callback is None or threading.get_ident() != self._thread or monotonic() - self._called < period:
            return
        self._called = monotonic()
        with self._lock:
            state = self._progress.state()
        self._callback(state)

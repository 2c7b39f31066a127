"""Draws a line at the foot of a terminal that changes in place; whatever else is printed appears above it."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import Any, TextIO

PERIOD_SECONDS = 0.2
_COLUMNS = 80  # of a terminal that does not know its width
_ERASE = "\r\x1b[2K"


class StatusLine:
    """A line at the foot of the terminal that the standard error or output is; nothing without a terminal.

    From `start` to `stop` both streams erase the line before they write, so that it takes no place of another line.
    """

    def __init__(self, compose: Callable[[int], str]) -> None:
        self._compose = compose
        self._lock = RLock()
        self._is_over = Event()
        self._terminal: TextIO | None = None  # where the line is drawn, while it is
        self._drawn = ""
        self._is_line_begun = False

    @property
    def is_drawn(self) -> bool:
        """Whether it has begun on a terminal, and not stopped."""
        return self._terminal is not None

    def start(self) -> None:
        """Draw the line from now on."""
        with self._lock:
            terminals = [stream for stream in (sys.stderr, sys.stdout) if stream.isatty()]
            if self._terminal or not terminals:
                return
            self._terminal, self._is_over = terminals[0], Event()
            sys.stdout, sys.stderr = (_Above(s, self) if s in terminals else s for s in (sys.stdout, sys.stderr))
            Thread(target=self._redraw, args=(self._is_over,), name="status line", daemon=True).start()

    def stop(self) -> None:
        """Erase the line, and draw it no more."""
        with self._lock:
            self._is_over.set()
            self._erase()
            self._terminal = None
            sys.stdout, sys.stderr = (s.stream if isinstance(s, _Above) else s for s in (sys.stdout, sys.stderr))

    def write_above(self, stream: TextIO, text: str) -> int:
        """Write to a stream of the terminal, in place of the line."""
        with self._lock:
            self._erase()
            self._is_line_begun = not text.endswith("\n") if text else self._is_line_begun
            return stream.write(text)

    def _erase(self) -> None:
        if self._drawn and self._terminal:
            self._draw("")

    def _draw(self, text: str) -> None:
        assert self._terminal is not None
        self._terminal.write(_ERASE + text)
        self._terminal.flush()
        self._drawn = text

    def _redraw(self, is_over: Event) -> None:
        while not is_over.wait(PERIOD_SECONDS):
            with self._lock:
                if is_over.is_set() or self._is_line_begun or self._terminal is None:
                    continue
                with suppress(OSError):  # a terminal that is closed meanwhile
                    columns = os.get_terminal_size(self._terminal.fileno()).columns or _COLUMNS
                    text = self._compose(columns - 1)
                    if text != self._drawn:
                        self._draw(text)


class _Above:
    """A stream of the terminal, whose text goes above a status line."""

    def __init__(self, stream: TextIO, line: StatusLine) -> None:
        self.stream, self._line = stream, line

    def write(self, text: str) -> int:
        """Write some text; returns its number of characters."""
        return self._line.write_above(self.stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

"""Handles the signals that stop a run."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # the exit status of a stopped run
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last two: of a batch system, of a terminal that is closed
Handler = Callable[[int, FrameType | None], Any]


def on_stop(handler: Handler | signal.Handlers) -> dict[int, Any]:
    """Return the handlers of signals to stop before this one, which handles those that the process does not ignore.

    There are none in a thread that can't have any; signals are ignored by a process that nohup started.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    # None stands for a handler that was not installed from Python, which Python can't install again.
    heeded = [number for number in _STOPS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in heeded}


def end_at_once(status: int = INTERRUPTED, text: bytes = b"interrupted\n") -> None:
    """Let signals to stop end the process at once, with a text on standard error: there is nothing to be undone."""
    on_stop(partial(_end, status, text))


def _end(status: int, text: bytes, *_: object) -> NoReturn:
    with suppress(OSError):
        os.write(2, text)
    os._exit(status)


@contextmanager
def handled(handler: Handler | signal.Handlers) -> Iterator[None]:
    """Handle signals to stop otherwise for a while."""
    before = on_stop(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def postponed() -> Iterator[None]:
    """Handle the first signal to stop once what is done here is over, e.g. an import that it would break."""
    came = list[int]()
    try:
        with handled(lambda number, _: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone signals to stop for a few seconds in which results are written."""
    with handled(signal.SIG_IGN):
        yield

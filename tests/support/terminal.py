import fcntl
import os
import pty
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pyte

from tests.support import forked

_LINES = 24


def run(arguments: Sequence[str], folder: Path, columns: int, timeout: float = 120.0) -> tuple[int, list[str]]:
    """The exit status of ``python ARGUMENTS`` on a terminal, and the lines of its screen and of its scrollback."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, columns, 0, 0))
    screen = pyte.HistoryScreen(columns, _LINES, history=10_000, ratio=0.5)
    reader = Thread(target=_read, args=(master, pyte.ByteStream(screen)))
    reader.start()
    terminal = Path(os.ttyname(slave))
    try:
        status = forked.end(forked.Program(arguments, folder, os.environ, timeout), (terminal, terminal))
    finally:
        os.close(slave)
        reader.join()
        os.close(master)
    above = ["".join(line[i].data for i in range(columns)) for line in screen.history.top]
    return status, [line.rstrip() for line in [*above, *screen.display]]


def _read(master: int, stream: pyte.ByteStream) -> None:
    """Show what programs write until the last of them has closed the terminal."""
    with suppress(OSError):
        while data := os.read(master, 65536):
            stream.feed(data)

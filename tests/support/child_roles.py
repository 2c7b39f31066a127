"""What child processes of tests do; nothing that takes time to import is here, since each of many children does."""

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Role:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: tuple[str, Any]) -> Iterator[Any]:
        name, value = request
        self.calls += 1
        yield from getattr(self, name)(value)

    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    def served(self, _: object) -> Iterator[int]:
        yield self.calls

    def environment(self, name: str) -> Iterator[tuple[str, int, int]]:
        yield os.environ.get(name, ""), os.getpid(), os.getpgid(0)

    def fail(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise ValueError("that can't be")

    def kill(self, number: int) -> Iterator[int]:
        yield 1
        os.kill(os.getpid(), number)
        time.sleep(60)

    def leave(self, status: int) -> Iterator[int]:
        print("first words\nlast words", file=sys.stderr)
        raise SystemExit(status)
        yield

    def linger(self, reason: str) -> Iterator[int]:
        """End, with something left that does not."""
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise SystemExit(reason)
        yield 0

    def hang_up(self, _: object) -> Iterator[int]:
        os.closerange(3, 100)
        time.sleep(60)
        yield 0

    def find(self, module: str) -> Iterator[bool]:
        yield importlib.util.find_spec(module) is not None

    def compute(self, note: str) -> Iterator[int]:
        """Start a tool, and compute in C without ever letting another thread of this process run."""
        tool = subprocess.Popen(["sleep", "60"])
        Path(note).write_text(f"{os.getpid()} {tool.pid}")
        ctypes.PyDLL(None).sleep(60)
        yield 0

    def abort(self, _: object) -> Iterator[int]:
        ctypes.string_at(0)
        yield 1

    def hang(self, note: str) -> Iterator[int]:
        """Start a grandchild that ignores what can be ignored, and hang with it."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        Path(note).write_text(f"{os.getpid()} {child}")
        yield child
        while True:
            signal.pause()

    def unpicklable(self, _: object) -> Iterator[Any]:
        yield lambda: None


class Stillborn:
    def __init__(self) -> None:
        raise RuntimeError("no coffee")

    def __call__(self, request: object) -> Iterator[object]:
        yield request

"""Starts a server as a process group, waits until it answers, and ends it with everything that it started."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.measure.server.client import Client
from tritongemm.system.child_process import kill_at_end_of
from tritongemm.system.printable import printable
from tritongemm.system.stop_signals import handled, uninterrupted

Result = TypeVar("Result")
_END_SECONDS = 10.0  # that a server may take to end by itself
_LONGEST_PAUSE_SECONDS = 1.0  # between two questions whether it answers
_LAST_BYTES = 1 << 14  # of its log that are shown
_SERVED = re.compile(r"\d+ of \d+ rows serve.*|tuned kernels serve .*|.*nothing is served by tuned kernels.*")
_STATE = re.compile(r"(\d+) \(.*\) \S (\d+)(?: \S+){17} (\d+)", re.DOTALL)  # /proc/PID/stat: number, parent, start


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end; a signal to stop raises KeyboardInterrupt wherever it has come to.

    By itself asyncio cancels the coroutine, which is lost where what it waits for ends at that moment.
    """
    with handled(signal.default_int_handler):
        return asyncio.run(work)


class Server:
    """A server that runs from `start` to `stop`; one whose parent is killed is killed by the operating system.

    It has only the variables of `environment`; what it prints goes to `log`.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, client: Client) -> None:
        self.command, self.environment, self.log, self.client = command, environment, log, client
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Start it; an InputError if its port is in use, an UnavailableError if the command can't be run."""
        if run(self.client.connects()):
            raise InputError(
                f"{self.client.address} is in use already: end what answers there, or choose another port (--port) in "
                "the server's command"
            )
        stops: list[int] = []
        with handled(lambda number, _: stops.append(number)), self.log.open("wb") as log:
            reading, self._lifeline = os.pipe()
            try:
                self._process = subprocess.Popen(
                    self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=(reading,), start_new_session=True,
                )  # fmt: skip
                kill_at_end_of(reading, self._process.pid)
            except OSError as error:
                os.close(self._lifeline)
                raise UnavailableError(f"{self.command[0]} can't be started: {error.strerror}") from None
            finally:
                os.close(reading)
        if stops:
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> float:
        """Wait until it answers, and return the seconds; an UnavailableError if it ends or does not answer in time."""
        begin, pause = time.monotonic(), 0.02
        while not run(self.client.is_healthy()):
            self.require_running("before it answered")
            if time.monotonic() - begin > seconds:
                raise UnavailableError(
                    f"the server did not answer {self.client.address}/health within {seconds:g} s; --start-limit "
                    "allows more, and --port names the port where the command does not"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._family |= _below(self._process.pid if self._process else 0)
        return time.monotonic() - begin

    def require_running(self, when: str, grace_s: float = 0.0) -> None:
        """Raise an UnavailableError, which says how and when, where it has ended, or does within some seconds."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(grace_s)
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            raise UnavailableError(f"the server ended {how} {when}")

    def stop(self) -> None:
        """End it, and what it started, also processes that left its group; return when they are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        with uninterrupted():
            self._family |= _below(process.pid)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while left := self._family & set(_running()):
                for pid, _ in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            os.close(self._lifeline)

    def served(self) -> list[str]:
        """Return what its log says about rows and layers that are served, each line once."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return list(dict.fromkeys(printable(found[0].strip()) for found in _SERVED.finditer(text)))

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of its log."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            return [printable(line) for line in log.read().decode(errors="replace").splitlines()[-count:]]
        return []


def _running() -> dict[tuple[int, int], int]:
    """Return the parent of each process that runs; it is named by its number and its start."""
    return {(int(pid), int(start)): int(parent) for pid, parent, start in map(_numbers, _states())}


def _numbers(state: str) -> tuple[str, str, str]:
    found = _STATE.match(state)
    return (found[1], found[2], found[3]) if found else ("0", "0", "0")


def _states() -> Iterator[str]:
    """Yield what the system says of each process that has not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state = path.read_text(encoding="utf-8", errors="replace")
            if state.rpartition(") ")[2][:1] not in "ZX":
                yield state


def _below(pid: int) -> set[tuple[int, int]]:
    """Return the processes that a process started, and those that they did."""
    parents, found, level = _running(), set[tuple[int, int]](), {pid}
    while level:
        below = {process for process, parent in parents.items() if parent in level} - found
        found |= below
        level = {process for process, _ in below}
    return found

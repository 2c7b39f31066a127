"""Runs processes that may die: they serve one request at a time, answers come one by one, and every wait has a limit.

Compilers crash and kernels fault or hang. Each runs in a process with a session of its own, so that a kill reaches the
tools it started too; the parent sees an exception and goes on with a new process. When the parent itself is gone, the
kernel kills them all: each process holds a pipe whose other end only the parent has open.
"""

import contextlib
import fcntl
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from tritongemm.core.errors import UnavailableError
from tritongemm.system import import_path, settings

_END_TIMEOUT_SECONDS = 10.0  # a process that has closed its pipes may take this long to end
_LONGEST_WAIT_SECONDS = 1e6  # Pipes are waited for in milliseconds of 32 bits; a longer wait is cut to this.
_LAST_OUTPUT_BYTES = 4000  # how much of its output is searched for the last line of an ended process
# Signals from an administrator, a batch system, or the kernel when memory is short.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
# What a child runs. `python -m` would put the current folder first on the path, and this must come before any import.
_CHILD = "import sys; sys.path[:] = {path!r}; from tritongemm.system.child_process import main; main()"


class WorkerDied(Exception):
    """The process ended without an answer; the text says how, with the last line that it wrote."""

    def __init__(self, how: str, from_outside: bool = False) -> None:
        super().__init__(how)
        self.from_outside = from_outside  # another program killed it: the request may succeed again


class WorkerTimeout(Exception):
    """The process gave no answer in time and was killed."""


class WorkerError(Exception):
    """The request raised an exception, whose text this has; the process goes on."""


class ServingProcess(Protocol):
    """A process that serves requests as a `WorkerProcess` does, here or on another host."""

    def start(self, opening: object = None) -> object:
        """Begin to start the process, if it does not run."""

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        """Return the answers to one request, as they come."""

    def kill(self) -> None:
        """End the process; the next request starts another."""


class WorkerProcess:
    """A process that serves requests to one object, an instance of its role, ``module:Class``.

    Calling that with a request yields answers. `environment` has variables to set in the process.
    """

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup_s: float = 120.0) -> None:
        self.role, self.environment, self.startup_s = role, environment or {}, startup_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self._opening = False, False

    def start(self, opening: object = None) -> None:
        """Begin to start the process, if there is none; the next request waits until it is ready.

        A new process works off the request `opening`, if there is one, before any other; what it answers or raises is
        dropped.

        Raises:
            UnavailableError: the system gives no more processes, memory or open files.
        """
        if self.alive:
            return
        self.kill()
        try:
            self._begin()
        except OSError as error:
            raise UnavailableError(
                f"no further process can be started: {error.strerror or error}; free some memory, end other processes, "
                "or raise the limits (ulimit -a), and run the same command again"
            ) from error
        self._ready, self._opening = False, opening is not None
        if opening is not None:
            with contextlib.suppress(BrokenPipeError):  # the next request reports how it died
                self._requests.send(opening)

    def _begin(self) -> None:
        """Start the process, tied to this one."""
        answers, their_answers = Pipe(duplex=False)
        their_requests, requests = Pipe(duplex=False)
        their_lifeline, lifeline = Pipe(duplex=False)
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
        path = import_path.for_children()
        with their_answers, their_requests, their_lifeline:
            pipes = their_requests.fileno(), their_answers.fileno()
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", _CHILD.format(path=path), self.role, *map(str, pipes)],
                env={**settings.for_own_children(), **self.environment, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(*pipes, their_lifeline.fileno()),
                start_new_session=True,
            )
            kill_at_end_of(their_lifeline.fileno(), self._process.pid)
        self._answers, self._requests, self._lifeline = answers, requests, lifeline
        self._log, self._log_start = log, 0  # and the bytes in it that earlier requests wrote

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        """Yield the answers to a request, which can be pickled, as they come; each within `timeout` seconds.

        Raises:
            UnavailableError: no process can be started.
            WorkerDied: the process ended; the next request starts another.
            WorkerTimeout: no answer came in time and the process was killed; the next request starts another.
            WorkerError: the request raised an exception; the process goes on.
        """
        try:
            self.start()
            while not self._ready or self._opening:
                if not self._answers.poll(min(self.startup_s, _LONGEST_WAIT_SECONDS)):
                    self.kill()
                    raise WorkerTimeout(f"did not start within {self.startup_s:g} s")
                kind, _ = self._answers.recv()
                self._opening = self._opening and kind not in ("end", "error")
                self._ready = True
            self._log_start = os.fstat(self._log.fileno()).st_size
            self._requests.send(request)
            while True:
                if not self._answers.poll(min(timeout, _LONGEST_WAIT_SECONDS)):
                    self.kill()
                    raise WorkerTimeout(f"no answer within {timeout:g} s")
                kind, value = self._answers.recv()
                if kind == "end":
                    return
                if kind == "error":
                    raise WorkerError(value)
                yield value
        except (EOFError, OSError):  # also where another thread has killed it
            raise self._death() from None

    def _death(self) -> WorkerDied:
        """End the process, and return how it died, with the last line that it wrote."""
        process = self._process
        if process is None:
            return WorkerDied("killed", from_outside=True)
        hung_up = False
        try:
            code = process.wait(_END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            hung_up = True
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = self._last_words()
        self.kill()
        return WorkerDied(f"{how}: {said}" if said else how, from_outside=-code in _FROM_OUTSIDE and not hung_up)

    def _last_words(self) -> str:
        """Return the last line that the process wrote for this request; "" for none."""
        with contextlib.suppress(ValueError):  # another thread has killed it, and closed the log
            self._log.seek(max(self._log_start, self._log.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""

    def kill(self) -> None:
        """End the process and everything it started; any thread may."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._answers.close()
        self._requests.close()
        self._lifeline.close()
        self._log.close()


def _interpreter_flags() -> list[str]:
    """Return the options that kept this process's Python from the environment and the user's own packages."""
    options = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [option for option, is_set in options.items() if is_set]


def kill_at_end_of(lifeline: int, group: int) -> None:
    """Make the operating system kill a group of processes once no process can write into a pipe any more.

    No process has to notice: one that computes in C dies as well, and so do the tools that it started.
    """
    with contextlib.suppress(OSError):  # a sandbox may lack it; there they end when their request is done
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def serve(role: str, requests: Connection, answers: Connection) -> None:
    """Answer requests in this process until the parent is gone."""
    module, name = role.split(":")
    handler: Callable[[Any], Iterator[Any]] = getattr(importlib.import_module(module), name)()
    answers.send(("ready", None))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        try:
            for answer in handler(request):
                answers.send(("answer", answer))
            answers.send(("end", None))
        except BrokenPipeError:
            return
        except SystemExit as end:
            # The process ends at once: a lost device may keep Python from ending while the parent waits.
            if not isinstance(end.code, int):
                print(end, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except Exception as error:
            traceback.print_exc()
            answers.send(("error", f"{type(error).__name__}: {error}"))


def main() -> None:
    """Serve as a child: the command line has the role and the numbers of two pipes."""
    # The parent handles Ctrl-C: it merges what is done and then ends these processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1], Connection(int(sys.argv[2]), writable=False), Connection(int(sys.argv[3]), readable=False))

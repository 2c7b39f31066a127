"""Processes that may die: they serve one request at a time, answers come one by one, and every wait has a limit.

Compilers crash and kernels fault or hang. Each runs in a process with a session of its own, so that a kill reaches the
tools it started too; the parent sees an exception and goes on with a fresh process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_END_TIMEOUT_SECONDS = 10.0  # A process that has closed its pipes may take so long to end.
_LAST_OUTPUT_BYTES = 4000  # The last line of an ended process is looked for in so much of its output.


class WorkerDied(Exception):
    """The process ended without an answer; the text says how, with the last line that it wrote."""


class WorkerTimeout(Exception):
    """The process gave no answer in time and was killed."""


class WorkerError(Exception):
    """The request raised an exception, whose text this has; the process goes on."""


class WorkerProcess:
    """A process that serves requests to one object.

    Args:
        role: ``module:Class``; one instance lives in the process; calling it with a request yields answers.
        environment: variables to set in the process.
        startup_s: seconds that the process may take to start.
    """

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup_s: float = 120.0) -> None:
        self.role, self.environment, self.startup_s = role, environment or {}, startup_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ready, self._opening = False, False

    def start(self, opening: object = None) -> None:
        """Begin to start the process, if there is none; the next request waits until it is ready.

        Args:
            opening: a request that a new process works off before any other; what it answers is dropped, and what it
                raises as well. None for no such request.
        """
        if self.alive:
            return
        self.kill()
        answer_pipe, request_pipe = os.pipe(), os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
        self._log_start = 0  # Bytes in the log that earlier requests wrote.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tritongemm.workers.child_process",
                self.role,
                str(request_pipe[0]),
                str(answer_pipe[1]),
            ],
            env={**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(request_pipe[0], answer_pipe[1]),
            start_new_session=True,
        )
        os.close(request_pipe[0])
        os.close(answer_pipe[1])
        self._answers = Connection(answer_pipe[0], writable=False)
        self._requests = Connection(request_pipe[1], readable=False)
        self._ready, self._opening = False, opening is not None
        if opening is not None:
            with contextlib.suppress(BrokenPipeError):  # whoever asks next is told how it died
                self._requests.send(opening)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        """Answers to one request, as they come.

        Args:
            request: anything that pickles.
            timeout: seconds to wait for each answer.

        Raises:
            WorkerDied: the process ended; the next request starts another.
            WorkerTimeout: no answer came in time and the process was killed; the next request starts another.
            WorkerError: the request raised an exception; the process goes on.
        """
        try:
            self.start()
            while not self._ready or self._opening:
                if not self._answers.poll(self.startup_s):
                    self.kill()
                    raise WorkerTimeout(f"did not start within {self.startup_s:g} s")
                kind, _ = self._answers.recv()
                self._opening = self._opening and kind not in ("end", "error")
                self._ready = True
            self._log_start = os.fstat(self._log.fileno()).st_size
            self._requests.send(request)
            while True:
                if not self._answers.poll(timeout):
                    self.kill()
                    raise WorkerTimeout(f"no answer within {timeout:g} s")
                kind, value = self._answers.recv()
                if kind == "end":
                    return
                if kind == "error":
                    raise WorkerError(value)
                yield value
        except (EOFError, BrokenPipeError, ConnectionError):
            raise WorkerDied(self._how_it_ended()) from None

    def _how_it_ended(self) -> str:
        """How the process ended, with the last line that it wrote; it is gone afterwards."""
        process = self._process
        if process is None:
            return "killed"
        try:
            code = process.wait(_END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._log.seek(max(self._log_start, self._log.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self.kill()
        return f"{how}{': ' + lines[-1].strip() if lines else ''}"

    def kill(self) -> None:
        """End the process and everything it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._answers.close()
        self._requests.close()
        self._log.close()


def serve(role: str, requests: Connection, answers: Connection) -> None:
    """Answer requests in this process until the parent is gone.

    Args:
        role: as of `WorkerProcess`.
        requests: where requests come from.
        answers: where answers go, as pairs of a kind and a value.
    """
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
            # The process ends at once: a lost device may keep Python from ending, and the parent would wait for it.
            if not isinstance(end.code, int):
                print(end, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except Exception as error:
            traceback.print_exc()
            answers.send(("error", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    # The parent handles Ctrl-C: it merges what is done and then ends these processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1], Connection(int(sys.argv[2]), writable=False), Connection(int(sys.argv[3]), readable=False))

"""Child processes that may die: one request at a time, answers as they come, a limit on every wait.

Compilers crash and kernels fault or hang. Each runs in a child of its own session, so that a kill reaches the tools it
started too; the parent sees an exception and goes on with a fresh child.
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

_LAST_SECONDS = 10.0  # for a process that has closed its pipes to end


class WorkerDied(Exception):
    """The child ended without an answer; the text says how, with the end of what it wrote."""


class WorkerTimeout(Exception):
    """The child gave no answer in time and was killed."""


class WorkerError(Exception):
    """The child is well but the request failed; the text is the exception's."""


class WorkerProcess:
    """A process that serves requests to one object.

    Args:
        role: ``module:Class``; one instance lives in the child; calling it with a request yields answers.
        environment: variables to set in the child.
        startup: seconds the child may take to start.
    """

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup: float = 120.0) -> None:
        self.role, self.environment, self.startup = role, environment or {}, startup
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Begin to start the process, if there is none; the next request waits until it is ready."""
        if self.alive:
            return
        self.kill()
        here, there = os.pipe(), os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
        self._before = 0  # what an earlier request wrote is not this one's
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tritongemm.workers.child_process", self.role, str(there[0]), str(here[1])],
            env={**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(there[0], here[1]),
            start_new_session=True,
        )
        os.close(there[0])
        os.close(here[1])
        self._answers = Connection(here[0], writable=False)
        self._requests = Connection(there[1], readable=False)
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        """Answers to one request, as they come.

        Args:
            request: anything that pickles.
            timeout: seconds to wait for each answer.

        Raises:
            ChildDied, ChildTimeout: and the process is gone; the next request starts another.
            ChildError: the request raised; the process goes on.
        """
        try:
            self.start()
            if not self._ready:
                if not self._answers.poll(self.startup):
                    self.kill()
                    raise WorkerTimeout(f"did not start within {self.startup:g} s")
                self._answers.recv()
                self._ready = True
            self._before = os.fstat(self._log.fileno()).st_size
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
            raise WorkerDied(self._epitaph()) from None

    def _epitaph(self) -> str:
        process = self._process
        if process is None:
            return "killed"
        try:
            code = process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._log.seek(max(self._before, self._log.seek(0, os.SEEK_END) - 4000))
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
    """Answer requests until the parent is gone."""
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
            # At once: a lost device may keep an interpreter from ending, and the parent would wait for it.
            if not isinstance(end.code, int):
                print(end, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except Exception as error:
            traceback.print_exc()
            answers.send(("error", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    # Ctrl-C is the parent's to handle: it merges what is done and then ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1], Connection(int(sys.argv[2]), writable=False), Connection(int(sys.argv[3]), readable=False))

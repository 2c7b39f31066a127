"""Holds child processes on a host of a Ray cluster, and returns their answers and faults as values."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any

from tritongemm.core.errors import UnavailableError
from tritongemm.system import settings
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout
from tritongemm.system.compiled_files import CompiledFiles

_KEY_DIGITS = 40


class HostProcesses:
    """An actor's processes of one role on its host, as many as requests are answered at a time."""

    def __init__(self, role: str, count: int) -> None:
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for _ in range(count):
            self._idle.put(WorkerProcess(role))

    def start(self, opening: object) -> None:
        """Start the idle processes; `opening` is that of `WorkerProcess.start`."""
        for process in self._taken():
            process.start(opening)
            self._idle.put(process)

    def end(self) -> None:
        """End the idle processes; the next request starts another."""
        for process in self._taken():
            process.kill()
            self._idle.put(process)

    def _taken(self) -> list[WorkerProcess]:
        taken: list[WorkerProcess] = []
        with suppress(Empty):
            while True:
                taken.append(self._idle.get_nowait())
        return taken

    def keep(self, files: Mapping[str, tuple[str, bytes]]) -> dict[str, str]:
        """Return the paths of compiled files, each a name and its content, that are kept in this host's cache."""
        cache = CompiledFiles(settings.cache_folder())
        kept: dict[str, str] = {}
        for key, (name, content) in files.items():
            entry = cache.keep(sha256(content).hexdigest()[:_KEY_DIGITS], {name: content}, {})
            kept[key] = str(entry.path / name)
        return kept

    def ask(self, request: Any, timeout: float) -> Iterator[tuple[str, Any]]:
        """Yield the answers to a request, each behind ``answer``; then, where it fails, how and why."""
        process = self._idle.get()
        try:
            yield from _answers(process, request, timeout)
        finally:
            self._idle.put(process)

    def ask_once(self, role: str, request: Any, timeout: float) -> list[tuple[str, Any]]:
        """Return the same of a process of another role, which then ends."""
        process = WorkerProcess(role)
        try:
            return list(_answers(process, request, timeout))
        finally:
            process.kill()


def _answers(process: WorkerProcess, request: Any, timeout: float) -> Iterator[tuple[str, Any]]:
    """Yield the answers of one process, as `HostProcesses.ask` has them."""
    try:
        for answer in process.ask(request, timeout):
            yield "answer", answer
    except WorkerDied as death:
        yield "killed" if death.from_outside else "died", str(death)
    except WorkerTimeout as late:
        yield "timeout", str(late)
    except (WorkerError, UnavailableError) as error:
        yield "error", str(error)


def fault_of(kind: str, why: str) -> Exception:
    """Return the exception that `WorkerProcess.ask` would have raised, from a last answer and its reason."""
    if kind == "timeout":
        return WorkerTimeout(why)
    return WorkerError(why) if kind == "error" else WorkerDied(why, from_outside=kind == "killed")

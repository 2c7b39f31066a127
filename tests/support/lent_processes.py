"""Compiler processes that outlive who asked for them: to start one takes longer than most tests compile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from tritongemm.workers.child_process import WorkerError, WorkerProcess


class LentProcess(WorkerProcess):
    """A process that is kept when it would be killed in good health, and lent to the next with the same environment."""

    idle: ClassVar[list[LentProcess]] = []
    kind: tuple[Any, ...] = ()
    _lending: ClassVar[threading.Lock] = threading.Lock()  # a compiler's threads start their children at the same time

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup_s: float = 120.0) -> None:
        super().__init__(role, {}, startup_s)  # a borrower's own scratch folder ends with it
        self._busy = False

    def start(self, opening: object = None) -> None:
        if not self.alive:
            kind = self._kind()
            with LentProcess._lending:
                found = next((c for c in LentProcess.idle if c.alive and c.kind == kind), None)
                if found:
                    LentProcess.idle.remove(found)
            if found:
                vars(self).update(vars(found))
            self.kind = kind
        super().start(opening)

    def ask(self, request: Any, timeout: float) -> Iterator[Any]:
        self._busy = True
        try:
            yield from super().ask(request, timeout)
        except WorkerError:
            self._busy = False
            raise
        self._busy = False

    def kill(self) -> None:
        if self.alive and self._ready and not self._busy:
            kept = LentProcess(self.role)
            vars(kept).update(vars(self))
            LentProcess.idle.append(kept)
            self._process = None
        else:
            super().kill()

    def _kind(self) -> tuple[Any, ...]:
        variables = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        return self.role, os.getcwd(), tuple(sys.path), tuple(sorted(variables.items()))

    @classmethod
    def end(cls) -> None:
        """End those that nobody has."""
        while cls.idle:
            WorkerProcess.kill(cls.idle.pop())

"""Compiler processes that outlive who asked for them: to start one takes longer than most tests compile."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from tritongemm.workers.child_process import WorkerError, WorkerProcess


class LentChild(WorkerProcess):
    """A child that is given back when it would be killed in good health, and lent again to who has the same surroundings."""

    idle: ClassVar[list[LentChild]] = []
    _lending: ClassVar[threading.Lock] = threading.Lock()  # a compiler's threads start their children at the same time

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup: float = 120.0) -> None:
        super().__init__(role, {}, startup)  # a borrower's own scratch folder ends with it
        self._busy = False

    def start(self) -> None:
        if not self.alive:
            kind = self._kind()
            with LentChild._lending:
                found = next((c for c in LentChild.idle if c.alive and c.kind == kind), None)
                if found:
                    LentChild.idle.remove(found)
            if found:
                vars(self).update(vars(found))
            self.kind = kind
        super().start()

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
            kept = LentChild(self.role)
            vars(kept).update(vars(self))
            LentChild.idle.append(kept)
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

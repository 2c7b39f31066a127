"""Compilers, planners and interpreters that outlive who asked for them: to start takes them longer than most uses."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.support import quick_interpreter
from tritongemm.system.child_process import WorkerError, WorkerProcess

# Variables whose value makes no difference: neither a compiler nor the interpreter looks for a GPU, and a request
# names its cache. The last three are set by PyTorch once it has compiled.
_ANY = ("PYTEST_CURRENT_TEST", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TRITONGEMM_CACHE", "XDG_CACHE_HOME",
        "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # fmt: skip

# What serves a role sooner with the same answers.
_SOONER = {"tritongemm.measure.interpreting:Interpreter": quick_interpreter.ROLE}


class LentProcess(WorkerProcess):
    """A process that is kept when it would be killed in good health, and lent to the next with the same environment."""

    idle: ClassVar[list["LentProcess"]] = []
    kind: tuple[Any, ...] = ()
    _lending: ClassVar[threading.Lock] = threading.Lock()  # a compiler's threads start their children at the same time

    def __init__(self, role: str, environment: dict[str, str] | None = None, startup_s: float = 120.0) -> None:
        kept = {k: v for k, v in (environment or {}).items() if k != "TMPDIR"}  # a borrower's own ends with it
        super().__init__(_SOONER.get(role, role), kept, startup_s)
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
        lasts = self.role.startswith(("tritongemm.", "toy_roles:")) or self.role in _SOONER.values()  # others may count
        if lasts and self.alive and self._ready and not self._busy:
            kept = LentProcess(self.role, self.environment)
            vars(kept).update(vars(self))
            LentProcess.idle.append(kept)
            self._process = None
        else:
            super().kill()

    def _kind(self) -> tuple[Any, ...]:
        variables = {k: v for k, v in {**os.environ, **self.environment}.items() if k not in _ANY}
        path = tuple(dict.fromkeys(sys.path))  # a folder that is named again is never reached
        return self.role, path, tuple(sorted(variables.items()))  # nothing depends on the current folder

    @classmethod
    def end(cls) -> None:
        """End those that are not lent."""
        while cls.idle:
            WorkerProcess.kill(cls.idle.pop())

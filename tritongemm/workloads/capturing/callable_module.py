"""The class of the module `tritongemm.capture`, which programs call and `python -m` runs."""

from __future__ import annotations

import os
from types import ModuleType

from tritongemm.workloads.capturing.session import Capture


class CallableModule(ModuleType):
    """A module that makes a `Capture` when it is called."""

    def __call__(self, path: str | os.PathLike[str]) -> Capture:
        """A capture into a file, for a ``with`` statement; `Capture` says more."""
        return Capture(path)

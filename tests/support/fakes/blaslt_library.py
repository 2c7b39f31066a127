"""The stand-in of cuBLASLt and hipBLASLt: what tests with it need beside the fixture `library`."""

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tritongemm.backends.blaslt import algorithms
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
# A device whose driver does not say what a graph holds.
NO_CAPTURE: Any = SimpleNamespace(api=SimpleNamespace(symbol=lambda role: ""))


@contextmanager
def stand_in(folder: Path, vendor: str, place: Path) -> Iterator[blaslt_library.Library]:
    """The stand-in as a vendor's library, which the backend takes for this machine's."""
    copy = shutil.copy(folder / f"{vendor}.so", place / "blaslt.so")  # its state starts anew
    found = blaslt_library.Library(blaslt_tables.TABLES[vendor], ctypes.CDLL(str(copy)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithms, "library", lambda: found)
        patch.setattr(algorithms, "vendor", lambda: vendor)
        patch.setattr(algorithms, "_stream", lambda device: 0)
        yield found
    algorithms._planned.cache_clear()
    algorithms._workspace.cache_clear()

"""What tests of backends share: the stand-in of the vendor's library."""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables


@pytest.fixture(params=["nvidia", "amd"])
def library(
    request: pytest.FixtureRequest, blaslt_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[blaslt_library.Library]:
    """The stand-in as cuBLASLt and as hipBLASLt, which the backend takes for this machine's library."""
    copy = shutil.copy(blaslt_libraries / f"{request.param}.so", tmp_path / "blaslt.so")  # its state starts anew
    found = blaslt_library.Library(blaslt_tables.TABLES[request.param], ctypes.CDLL(str(copy)))
    monkeypatch.setattr(blaslt, "library", lambda: found)
    monkeypatch.setattr(blaslt, "vendor", lambda: request.param)
    monkeypatch.setattr(blaslt, "_stream", lambda device: 0)
    yield found
    blaslt._planned.cache_clear()
    blaslt._workspace.cache_clear()

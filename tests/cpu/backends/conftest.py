"""What tests of backends share: the stand-in of the vendor's library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import FAKES
from tritongemm.backends.blaslt import algorithms as blaslt
from tritongemm.hip_ext.blaslt import library as blaslt_library
from tritongemm.hip_ext.blaslt import tables as blaslt_tables


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the compiled stand-ins."""
    folder, source = tmp_path_factory.mktemp("fake"), str(FAKES / "blaslt.cpp")
    for vendor, flags in (("nvidia", []), ("amd", ["-DAMD"])):
        command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", *flags, source, "-o", str(folder / f"{vendor}.so")]
        subprocess.run(command, check=True, timeout=120)
    return folder


@pytest.fixture(params=["nvidia", "amd"])
def library(
    request: pytest.FixtureRequest, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[blaslt_library.Library]:
    """The stand-in as cuBLASLt and as hipBLASLt, which the backend takes for this machine's library."""
    copy = shutil.copy(built / f"{request.param}.so", tmp_path / "blaslt.so")  # its state starts afresh
    found = blaslt_library.Library(blaslt_tables.TABLES[request.param], ctypes.CDLL(str(copy)))
    monkeypatch.setattr(blaslt, "library", lambda: found)
    monkeypatch.setattr(blaslt, "vendor", lambda: request.param)
    monkeypatch.setattr(blaslt, "_stream", lambda device: 0)
    yield found
    blaslt._plan.cache_clear()
    blaslt._workspace.cache_clear()

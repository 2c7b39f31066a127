"""What the CPU tests share."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lent import LentChild
from racing import Drop

from tritongemm import compile
from tritongemm.hip_ext import driver

# Worked examples from the field, where a checkout has them next to it; they are no part of the repository.
DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of compiled kernels for the whole run, whatever its processes, and never the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
        folder.mkdir(exist_ok=True)
        patch.setenv("TRITONGEMM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def lent_compilers() -> Iterator[None]:
    """Compiler processes of a test go on to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "Child", LentChild)
        yield
        LentChild.end()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of worked examples; skips where there is none."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not here")
    return DATA


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts a backend beside those that are there; names begin with ``toy``."""
    package = importlib.import_module("tritongemm.backends")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    def add(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield add
    for name in [n for n in sys.modules if n.startswith("tritongemm.backends.toy")]:
        del sys.modules[name]
        vars(package).pop(name.rpartition(".")[2], None)


@pytest.fixture(scope="module")
def without_gpu() -> Iterator[None]:
    """A machine without one, for this process and those it starts, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "present", lambda: None)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("HIP_VISIBLE_DEVICES", "")
        yield

"""The stand-in of cuBLASLt and hipBLASLt: what tests with it need beside the fixture `library`."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
# A device whose driver does not say what a graph holds.
NO_CAPTURE: Any = SimpleNamespace(api=SimpleNamespace(symbol=lambda role: ""))

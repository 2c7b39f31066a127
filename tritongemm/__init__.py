"""A Triton-first GEMM autotuner. `mm` serves what was tuned; `load` and `explain` go with it. `capture` writes sizes.

PyTorch is imported on first use of one of them, so the command line starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritongemm.core import settings

if TYPE_CHECKING:
    from tritongemm.capturing.session import Capture as capture
    from tritongemm.serving.api import explain, load, mm

__all__ = ["capture", "explain", "load", "mm"]


def __getattr__(name: str) -> Any:
    if name == "capture":
        return importlib.import_module("tritongemm.capture")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tritongemm.serving import api

    globals().update({each: getattr(api, each) for each in ("explain", "load", "mm")})
    return globals()[name]


if settings.capture_files() and not settings.is_own_command():
    from tritongemm.capturing.session import start_if_asked

    start_if_asked()

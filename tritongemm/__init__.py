"""A Triton-first GEMM autotuner. `mm` serves what was tuned; `load`, `explain`, `patch` and `serve` go with it.

`capture` writes what a program asks PyTorch to multiply.

PyTorch is imported on first use of one of them, so the command line starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritongemm.core import settings

if TYPE_CHECKING:
    from tritongemm.capturing.session import Capture as capture
    from tritongemm.serving.api import explain, load, mm
    from tritongemm.serving.grouped_api import grouped_mm
    from tritongemm.serving.moe_api import fused_moe
    from tritongemm.serving.patch import patch
    from tritongemm.serving.serve import serve

__all__ = ["capture", "explain", "fused_moe", "grouped_mm", "load", "mm", "patch", "serve"]


def __getattr__(name: str) -> Any:
    if name == "capture":
        return importlib.import_module("tritongemm.capture")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("fused_moe", "grouped_mm"):
        module = importlib.import_module(f"tritongemm.serving.{'moe' if name == 'fused_moe' else 'grouped'}_api")
        globals()[name] = getattr(module, name)
        return globals()[name]
    from tritongemm.serving import api, patch, serve

    globals().update({each: getattr(api, each) for each in ("explain", "load", "mm")})
    globals().update({"patch": patch.patch, "serve": serve.serve})
    return globals()[name]


if settings.capture_files() and not settings.is_own_command():
    from tritongemm.capturing.session import start_if_asked

    start_if_asked()

"""A Triton-first GEMM autotuner. `mm`, `bmm` and `scaled_mm` serve what was tuned.

`load`, `explain`, `patch` and `serve` go with them; `autotune` tunes.
`capture` writes what a program asks PyTorch to multiply.

PyTorch is imported on first use of one of them, so the command line starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritongemm.system import settings
from tritongemm.system.version import VERSION as __version__

if TYPE_CHECKING:
    from tritongemm.cli.autotune import Results, autotune
    from tritongemm.operations.checks import check_scales
    from tritongemm.serving.api import explain, load, mm
    from tritongemm.serving.batched import bmm, scaled_bmm
    from tritongemm.serving.grouped_api import grouped_mm
    from tritongemm.serving.layouts import pack_scales, pack_weight, unpack_scales, unpack_weight
    from tritongemm.serving.linear_fp8 import linear_fp8
    from tritongemm.serving.moe_api import fused_moe
    from tritongemm.serving.patch import patch
    from tritongemm.serving.quantize import quantize
    from tritongemm.serving.scaled_api import scaled_mm
    from tritongemm.serving.serve import serve
    from tritongemm.tuning.request import TuneRequest
    from tritongemm.workloads.capturing.session import Capture as capture

__all__ = [
    "Results",
    "TuneRequest",
    "__version__",
    "autotune",
    "bmm",
    "capture",
    "check_scales",
    "explain",
    "fused_moe",
    "grouped_mm",
    "linear_fp8",
    "load",
    "mm",
    "pack_scales",
    "pack_weight",
    "patch",
    "quantize",
    "scaled_bmm",
    "scaled_mm",
    "serve",
    "unpack_scales",
    "unpack_weight",
]


# Where each name lies; a module is imported when the first of its names is used.
_PLACES = {
    "Results": "cli.autotune",
    "TuneRequest": "tuning.request",
    "autotune": "cli.autotune",
    "bmm": "serving.batched",
    "check_scales": "operations.checks",
    "explain": "serving.api",
    "fused_moe": "serving.moe_api",
    "grouped_mm": "serving.grouped_api",
    "load": "serving.api",
    "mm": "serving.api",
    "pack_scales": "serving.layouts",
    "pack_weight": "serving.layouts",
    "patch": "serving.patch",
    "quantize": "serving.quantize",
    "linear_fp8": "serving.linear_fp8",
    "scaled_bmm": "serving.batched",
    "scaled_mm": "serving.scaled_api",
    "serve": "serving.serve",
    "unpack_scales": "serving.layouts",
    "unpack_weight": "serving.layouts",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name == "capture":
        return importlib.import_module("tritongemm.capture")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return globals()[name]


if settings.capture_files() and not settings.is_own_command():
    from tritongemm.workloads.capturing.session import start_if_asked

    start_if_asked()

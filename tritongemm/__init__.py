"""A Triton-first GEMM autotuner. `mm` serves what was tuned; `load` and `explain` go with it.

PyTorch is imported on first use of one of them, so the command line starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritongemm.serving.api import explain, load, mm

__all__ = ["explain", "load", "mm"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tritongemm.serving import api

    globals().update({each: getattr(api, each) for each in __all__})
    return globals()[name]

"""A Triton-first GEMM autotuner. `mm`, `bmm` and `scaled_mm` serve what was tuned.

`load`, `explain`, `patch` and `serve` go with them; `autotune` tunes.
`capture` writes what a program asks PyTorch to multiply.

PyTorch is imported on first use of one of them, so the command line starts without it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from tritongemm.system import settings
from tritongemm.system.version import VERSION

if TYPE_CHECKING:
    from tritongemm.cli.autotune import Results as Results
    from tritongemm.cli.autotune import autotune as autotune
    from tritongemm.operations.checks import check_scales as check_scales
    from tritongemm.operations.four_bit_weights import pack_awq as pack_awq
    from tritongemm.operations.four_bit_weights import pack_compressed_tensors as pack_compressed_tensors
    from tritongemm.operations.four_bit_weights import pack_gptq as pack_gptq
    from tritongemm.operations.four_bit_weights import pack_marlin as pack_marlin
    from tritongemm.operations.four_bit_weights import pack_mxfp4 as pack_mxfp4
    from tritongemm.operations.four_bit_weights import pack_nvfp4 as pack_nvfp4
    from tritongemm.operations.linear_act import interleave_gate_up as interleave_gate_up
    from tritongemm.serving.added_operations import linear_act as linear_act
    from tritongemm.serving.added_operations import linear_act_quantize as linear_act_quantize
    from tritongemm.serving.added_operations import linear_add as linear_add
    from tritongemm.serving.added_operations import linear_w4 as linear_w4
    from tritongemm.serving.api import load as load
    from tritongemm.serving.api import mm as mm
    from tritongemm.serving.explaining import explain as explain
    from tritongemm.serving.layouts import pack_scales as pack_scales
    from tritongemm.serving.layouts import pack_weight as pack_weight
    from tritongemm.serving.layouts import unpack_scales as unpack_scales
    from tritongemm.serving.layouts import unpack_weight as unpack_weight
    from tritongemm.serving.linear_fp8 import linear_fp8 as linear_fp8
    from tritongemm.serving.mixtures import fused_moe as fused_moe
    from tritongemm.serving.patch import patch as patch
    from tritongemm.serving.products import bmm as bmm
    from tritongemm.serving.products import grouped_mm as grouped_mm
    from tritongemm.serving.products import scaled_bmm as scaled_bmm
    from tritongemm.serving.products import scaled_mm as scaled_mm
    from tritongemm.serving.quantize import quantize as quantize
    from tritongemm.serving.serve import serve as serve
    from tritongemm.tune.request import TuneRequest as TuneRequest
    from tritongemm.workloads.capturing.session import capture as capture

__version__ = VERSION

# The names of the API, by the module that defines them, which is imported when the first of them is used.
_NAMES = {
    "cli.autotune": "Results autotune",
    "serving.api": "load mm",
    "serving.explaining": "explain",
    "serving.layouts": "pack_scales pack_weight unpack_scales unpack_weight",
    "serving.linear_fp8": "linear_fp8",
    "serving.added_operations": "linear_act linear_act_quantize linear_add linear_w4",
    "serving.mixtures": "fused_moe",
    "operations.checks": "check_scales",
    "operations.linear_act": "interleave_gate_up",
    "operations.four_bit_weights": "pack_awq pack_compressed_tensors pack_gptq pack_marlin pack_mxfp4 pack_nvfp4",
    "serving.patch": "patch",
    "serving.quantize": "quantize",
    "serving.products": "bmm grouped_mm scaled_bmm scaled_mm",
    "serving.serve": "serve",
    "tune.request": "TuneRequest",
    "workloads.capturing.session": "capture",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, "__version__"])


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        if name.startswith("_") or importlib.util.find_spec(f"{__name__}.operations.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.serving.added_operations").function_of(name)
    globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return globals()[name]


if settings.capture_files() and not settings.is_own_command():
    from tritongemm.workloads.capturing.session import start_if_asked

    start_if_asked()

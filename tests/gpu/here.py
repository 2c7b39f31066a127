"""This machine's GPU: its names, results of kernels for it, and graphs of calls."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.nouns import Config, Family, Problem, Record, Target, registry, settings
from tritongemm.hip_ext.driver import driver
from tritongemm.plugins.contracts import SearchedBackend

VENDOR = driver.find_vendor() if torch.cuda.is_available() else None
ARCH = driver.open_driver(VENDOR).device().arch if VENDOR else "sm90"
TMA = ARCH.startswith("sm") and int(ARCH[2:]) >= 90
DENSE = registry.get(Family, "dense")
needs_gpu = pytest.mark.skipif(VENDOR is None, reason="no GPU")
nvidia = pytest.mark.skipif(VENDOR != "nvidia", reason="NVIDIA only")


def triton() -> SearchedBackend:
    return registry.get(SearchedBackend, "triton")


def fp8(target: Target) -> str:
    """The name of e4m3 in the GPU's encoding; a GPU without units for it has the usual one's."""
    return "fp8e4m3fnuz" if target.fp8 == "fnuz" else "fp8e4m3fn"


def needed_fp8(target: Target) -> str:
    if target.fp8 == "none":
        pytest.skip("no fp8 units")
    return fp8(target)


def record(of: Problem, config: Config, **changes: Any) -> Record:
    """A result of a kernel that won against a slow library, on this GPU and with this Triton."""
    units = driver.open_driver(VENDOR or "").device().properties["compute_units"]
    made = Record(
        of, ARCH, config, "triton", 1e-6, 0.0, "events", compute_units=units,
        toolchain={"triton": settings.version("triton")}, library="torch", library_seconds=1.0,
    )  # fmt: skip
    return replace(made, **changes)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def graph_of(call: Callable[..., Any], *given: Any, **named: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, and the result that it writes when it is replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*given, **named)
    return graph, result


def replayed(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    graph, result = graph_of(call, *given, **named)
    graph.replay()
    torch.cuda.synchronize()
    return result

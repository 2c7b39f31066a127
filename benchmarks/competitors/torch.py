"""The baseline: PyTorch's GEMM as it comes, cuBLAS(Lt) or hipBLASLt under it."""

from __future__ import annotations

from collections.abc import Callable

from competitors import BASELINE, Ready, Refused, Setting
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend

NOTE = "torch.mm(x, w.T, out=y), the library's own choice of kernel"


def operations(setting: Setting) -> list[Callable[[], object]]:
    """PyTorch's call for each copy of the operands."""
    backend = registry.get(LibraryBackend, BASELINE)
    found = [backend.operation(setting.problem, operands) for operands in setting.bench.sets]
    calls = [call for call in found if call is not None]
    if len(calls) < len(found):
        raise Refused(f"PyTorch has no GEMM for {setting.problem.key}")
    return calls


def prepare(setting: Setting) -> Ready:
    """Take PyTorch's call as it comes."""
    return Ready(operations(setting))

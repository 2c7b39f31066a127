"""The baseline: PyTorch's GEMM as it comes, cuBLAS(Lt) or hipBLASLt under it."""

from __future__ import annotations

from contenders import Ready, Refused, Setting
from tritongemm.plugins import _modules as registry

NOTE = "torch.mm(x, w.T, out=y), the library's own choice of kernel"


def operations(setting: Setting) -> list:
    """PyTorch's call for each copy of the operands."""
    backend = registry.load("backends", "torch")
    found = [backend.operation(setting.problem, operands) for operands in setting.bench.sets]
    if found[0] is None:
        raise Refused(f"PyTorch has no GEMM for {setting.problem.key}")
    return found


def prepare(setting: Setting) -> Ready:
    return Ready(operations(setting))

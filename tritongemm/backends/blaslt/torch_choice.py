"""Loads the kernel that PyTorch itself would launch for a linear layer, where its request to the library is known.

PyTorch queries the library at every call, and takes its first proposal within PyTorch's workspace. Queried once with
the same workspace, the library proposes the same kernel; `tests/gpu/test_direct.py` compares the launches.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem

if TYPE_CHECKING:
    from tritongemm.backends.blaslt.served_algorithm import LoadedAlgorithm
    from tritongemm.hip_ext.driver import driver

# Bytes of PyTorch's workspace by bias, for each architecture, version of torch and version of CUDA on which the
# library, given these, was seen to launch the kernels that PyTorch launches.
WORKSPACE_BYTES = {("sm90", "2.11", "13.0"): {"none": 32 << 20, "n": 1 << 20}}
_DTYPES = ("bf16", "fp16", "fp32")
# Environment variables that begin so change what PyTorch asks for.
_VARIABLES = ("CUBLAS", "TORCH_BLAS", "TORCH_CUBLAS", "DISABLE_ADDMM_CUDA_LT")


def load_torch_default(
    problem: Problem, precision: str, device_index: int, device: driver.Device
) -> tuple[LoadedAlgorithm, int] | None:
    """Return the kernel that PyTorch itself would launch, and the bytes of workspace that PyTorch gives it.

    The problem is of x [M, K] and w [N, K]; float32 is multiplied as `precision` says, ``fp32`` or ``tf32``.

    Returns:
        None if that kernel isn't known, or the library can't be queried.
    """
    from tritongemm.backends.blaslt import served_algorithm

    workspace_bytes = torch_workspace_bytes(problem, device.arch)
    if workspace_bytes is None:
        return None
    try:
        kernel = served_algorithm.load_first_choice(problem, precision, workspace_bytes, device_index, device)
    except (TritonGemmError, LookupError):
        return None
    return kernel, workspace_bytes


def torch_workspace_bytes(problem: Problem, arch: str) -> int | None:
    """Return the bytes of workspace that PyTorch, as it is set, gives the library; None if its kernel isn't known."""
    release = ".".join(torch.__version__.split(".")[:2])
    known = WORKSPACE_BYTES.get((arch, release, torch.version.cuda or ""))
    dtypes = {problem.a.dtype, problem.b.dtype, problem.c.dtype}
    if known is None or len(dtypes) > 1 or problem.a.dtype not in _DTYPES or _changes_choice():
        return None
    # For these PyTorch calls another library, or none, or places a single number in memory differently.
    if problem.k == 1 or (problem.n == 1 and (problem.m == 1 or problem.bias == "n")):
        return None
    return known[problem.bias]


def _changes_choice() -> bool:
    """Return whether a setting changes PyTorch's choice."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    return (
        any(name.startswith(_VARIABLES) for name in os.environ)
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.tunable.is_enabled()
        or library not in (torch._C._BlasBackend.Default, torch._C._BlasBackend.Cublas)
        or matmul.allow_fp16_accumulation
        or not matmul.allow_bf16_reduced_precision_reduction
        or not matmul.allow_fp16_reduced_precision_reduction
        or torch._C._get_sm_carveout_experimental() is not None
    )

"""What PyTorch asks of the vendor's library for a linear layer, where that is known."""

from __future__ import annotations

import os

import torch

from tritongemm.core.problem import Problem

# Bytes of workspace by bias, where both were seen to launch the same kernels: architecture, torch, CUDA.
WORKSPACE = {("sm90", "2.11", "13.0"): {"none": 32 << 20, "n": 1 << 20}}
_DTYPES = ("bf16", "fp16", "fp32")
_VARIABLES = ("CUBLAS", "TORCH_BLAS", "TORCH_CUBLAS", "DISABLE_ADDMM_CUDA_LT")  # change PyTorch's choice


def workspace(problem: Problem, arch: str) -> int | None:
    """Bytes that PyTorch, as it is set now, gives the library for a problem; None where it isn't known to agree.

    Args:
        problem: as `mm` asks for it.
        arch: the device's architecture.
    """
    release = ".".join(torch.__version__.split(".")[:2])
    known = WORKSPACE.get((arch, release, torch.version.cuda or ""))
    dtypes = {problem.dtype_a, problem.dtype_b, problem.dtype_c}
    if known is None or len(dtypes) > 1 or problem.dtype_a not in _DTYPES or not _as_it_comes():
        return None
    # For these PyTorch calls another library, or none, or says otherwise how a single number lies in memory.
    if problem.k == 1 or (problem.n == 1 and (problem.m == 1 or problem.bias == "n")):
        return None
    return known[problem.bias]


def _as_it_comes() -> bool:
    """Whether nothing was set that makes PyTorch choose otherwise."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    return not (
        any(name.startswith(_VARIABLES) for name in os.environ)
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.tunable.is_enabled()
        or library not in (torch._C._BlasBackend.Default, torch._C._BlasBackend.Cublas)
        or matmul.allow_fp16_accumulation
        or not matmul.allow_bf16_reduced_precision_reduction
        or not matmul.allow_fp16_reduced_precision_reduction
        or torch._C._get_sm_carveout_experimental() is not None
    )

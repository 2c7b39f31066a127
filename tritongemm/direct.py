"""PyTorch's own kernel for a linear layer, called without PyTorch: the same algorithm of the library, chosen once.

PyTorch asks cuBLAS anew at every call, and takes what the library proposes within a workspace of PyTorch's. Asked once
within the same workspace, cuBLASLt proposes the same kernel; `tests/gpu/test_direct.py` compares the launches.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

from tritongemm.errors import TritonGemmError
from tritongemm.problem import Problem
from tritongemm.scratch import Scratch

if TYPE_CHECKING:
    from tritongemm.backends._blaslt_served import Solution
    from tritongemm.bound import Place

# Bytes of workspace by bias, where both were seen to launch the same kernels: architecture, torch, CUDA.
WORKSPACE = {("sm90", "2.11", "13.0"): {"none": 32 << 20, "n": 1 << 20}}
_DTYPES = ("bf16", "fp16")
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
    if problem.bias == "n" and problem.n == 1:  # PyTorch adds up such a product itself
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


class Direct:
    """PyTorch's kernels on one device, each asked for once.

    Args:
        place: the device; its scratch memory grows to what PyTorch gives the library, where a kernel needs any.
    """

    MOST = 8192  # problems; sequences of any length must not fill the memory

    def __init__(self, place: Place) -> None:
        self._place, self._found, self._lock = place, dict[Problem, "Solution | None"](), threading.Lock()

    def find(self, problem: Problem) -> Solution | None:
        """The kernel for a problem; None where it isn't known which it is, or first asked for during a capture."""
        if problem not in self._found and not torch.cuda.is_current_stream_capturing():
            with self._lock, torch.cuda.device(self._place.index):
                if problem not in self._found:  # or another thread has asked meanwhile
                    if len(self._found) >= self.MOST:
                        self._found.clear()
                    self._found[problem] = self._ask(problem)
        return self._found.get(problem)

    def _ask(self, problem: Problem) -> Solution | None:
        place, most = self._place, workspace(problem, self._place.arch)
        if most is None:
            return None
        from tritongemm.backends import _blaslt_served

        try:
            found = _blaslt_served.first(problem, most, place.index, place.device)
        except (TritonGemmError, LookupError):
            return None
        have, each = (place.scratch.workspace, place.scratch.each) if place.scratch else (0, 0)
        if have < found.bytes("workspace"):
            place.scratch = Scratch(place.device, most, each)  # calls that are ready keep theirs
        return found

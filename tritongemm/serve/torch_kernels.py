"""PyTorch's own kernel for a linear layer, called without PyTorch: the same algorithm of the library, chosen once.

PyTorch asks the library anew at every call, and takes what it proposes within a workspace of PyTorch's. Asked once within
the same workspace, it proposes the same kernel; `tests/gpu/test_direct.py` compares the launches.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.runtime.workspaces import WorkspacePool

if TYPE_CHECKING:
    from tritongemm.backends.blaslt.served_algorithm import ServedAlgorithm
    from tritongemm.runtime.patched_launch import ServingDevice


class TorchKernels:
    """PyTorch's kernels on one device, each asked for once.

    Args:
        place: the device; its scratch memory grows to what PyTorch gives the library, where a kernel needs any.
    """

    MOST = 8192  # problems; sequences of any length must not fill the memory

    def __init__(self, place: ServingDevice) -> None:
        self._place, self._found, self._lock = (
            place,
            dict[tuple[Problem, str], "ServedAlgorithm | None"](),
            threading.Lock(),
        )

    def find(self, problem: Problem, compute: str) -> ServedAlgorithm | None:
        """The kernel for a problem, whose products are computed in ``fp32`` or ``tf32``; None where it isn't known which
        it is, or first asked for during a capture.
        """
        key = problem, compute
        if key not in self._found:
            with torch.cuda.device(self._place.index):
                if torch.cuda.is_current_stream_capturing():
                    return None
                with self._lock:
                    if key not in self._found:  # or another thread has asked meanwhile
                        if len(self._found) >= self.MOST:
                            self._found.clear()
                        self._found[key] = self._ask(*key)
        return self._found.get(key)

    def _ask(self, problem: Problem, compute: str) -> ServedAlgorithm | None:
        from tritongemm.backends.blaslt import served_algorithm, torch_choice

        place = self._place
        most = torch_choice.workspace(problem, place.arch)
        if most is None:
            return None
        try:  # whatever goes wrong, PyTorch is there
            with place.device.relaxed():
                found = served_algorithm.torch_default(problem, compute, most, place.index, place.device)
                have, each = (place.scratch.workspace, place.scratch.each) if place.scratch else (0, 0)
                if have < found.bytes("workspace"):
                    place.scratch = WorkspacePool(place.device, most, each)  # calls that are ready keep theirs
        except (TritonGemmError, LookupError):
            return None
        return found

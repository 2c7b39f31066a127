"""PyTorch's own kernels for linear layers, launched without PyTorch."""

import threading

import torch

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.core.served_call import LoadedKernel
from tritongemm.operations.served_problems import is_layer
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import LibraryBackend
from tritongemm.serving.serving_device import ServingDevice

_MOST_KERNELS = 8192  # Kernels kept for one device; sequences of any length must not fill the memory.


class TorchKernels:
    """PyTorch's kernels on one device, each looked for once."""

    def __init__(self, device: ServingDevice) -> None:
        self._device = device
        self._libraries = registry.every(LibraryBackend)
        self._kernels: dict[tuple[Problem, str], LoadedKernel | None] = {}
        self._lock = threading.Lock()

    def find(self, problem: Problem, precision: str) -> LoadedKernel | None:
        """Return the kernel that PyTorch launches for a problem, float32 multiplied as ``fp32`` or ``tf32``.

        Returns:
            None where it isn't known which kernel that is, as of every product with scales, or where it is looked for
            first during a capture.
        """
        key = problem, precision
        if not is_layer(problem):
            return None
        if key not in self._kernels:
            with torch.cuda.device(self._device.index):
                if torch.cuda.is_current_stream_capturing():
                    return None
                with self._lock:
                    if key not in self._kernels:  # Another thread may have looked for it meanwhile.
                        if len(self._kernels) >= _MOST_KERNELS:
                            self._kernels.clear()
                        self._kernels[key] = self._load(*key)
        return self._kernels.get(key)

    def _load(self, problem: Problem, precision: str) -> LoadedKernel | None:
        """Return the kernel from the first library that knows it, with workspaces for it."""
        device = self._device
        try:  # Whatever goes wrong, PyTorch itself is there.
            with device.driver_device.relaxed():
                for library in self._libraries:
                    found = library.default_kernel(problem, precision, device.index, device.driver_device)
                    if found is not None:
                        self._reserve(*found)
                        return found[0]
        except (TritonGemmError, LookupError):
            pass
        return None

    def _reserve(self, kernel: LoadedKernel, workspace_bytes: int) -> None:
        """Have a workspace for a kernel, as large as PyTorch gives the library, so that the next kernel finds it."""
        device, needed = self._device, kernel.bytes("workspace")
        pool = device.workspaces
        if needed > (pool.workspace_bytes if pool else 0):
            device.reserve_workspaces(workspace_bytes, pool.counter_bytes if pool else 0)

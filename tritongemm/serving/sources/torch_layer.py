"""Kernel source: PyTorch's linear layer, which computes whatever no other source does."""

from typing import ClassVar

import torch

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels


class TorchLayer(KernelSource):
    """PyTorch's linear layer."""

    rank: ClassVar[int] = 1000

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution:
        """Return PyTorch, with the reason why no tuned kernel computes the call."""
        # A capture must not be the first to look for a kernel, so an equal call may be resolved otherwise after it.
        lasting = not torch.cuda.is_current_stream_capturing()
        return Resolution("fallback", device.why_not_tuned(call), lasting=lasting)

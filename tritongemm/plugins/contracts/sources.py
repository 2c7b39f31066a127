"""The contract of who may serve a call at run time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from tritongemm.core.serving import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts.plugin import Plugin


class KernelSource(Plugin, abstract=True):
    """Who may serve a call at run time.

    Attributes:
        rank: sources are asked in the order of their ranks, the lowest first.
    """

    package = "tritongemm.serving.sources"
    kind = "kernel source"
    rank: ClassVar[int]

    @abstractmethod
    def resolve(self, call: CallSignature, device: Any) -> Resolution | Support:
        """Who serves the call on a device (`serve.device_kernels.DeviceKernels`), or why this source does not."""

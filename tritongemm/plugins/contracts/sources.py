"""The contract of who may serve a call at run time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from tritongemm.core.serving import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts.plugin import Plugin


class KernelSource(Plugin, abstract=True):
    """A source of kernels that may serve a call at run time.

    Attributes:
        rank: sources are asked in the order of their ranks, the lowest first.
    """

    package = "tritongemm.serving.sources"
    kind = "kernel source"
    rank: ClassVar[int]

    @abstractmethod
    def resolve(self, call: CallSignature, device: Any) -> Resolution | Support:
        """The kernel that serves a call on a device (`serving.device_kernels.DeviceKernels`), or why this has none."""

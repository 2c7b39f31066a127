"""The contract of kernel sources, which may serve a call at run time."""

from abc import abstractmethod
from typing import Any, ClassVar

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts.plugin import Plugin


class KernelSource(Plugin, abstract=True):
    """A source of kernels that may serve a call at run time."""

    package = "tritongemm.serving.sources"
    kind = "kernel source"
    rank: ClassVar[int]  # sources are asked in ascending order of their ranks

    @abstractmethod
    def resolve(self, call: CallSignature, device: Any) -> Resolution | Support:
        """Return the kernel that serves a call on a device (a `DeviceKernels` of serving), or why there is none."""

    def review(self, answer: Resolution, call: CallSignature, device: Any) -> Resolution | Support:
        """Return the answer of any source, or why it must not serve a call."""
        return answer

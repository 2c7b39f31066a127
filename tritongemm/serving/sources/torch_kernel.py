"""Kernel source: PyTorch's own kernel for a size that was not tuned, once it is called frequently."""

from typing import ClassVar

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving import calls
from tritongemm.serving.device_kernels import DeviceKernels


class TorchKernel(KernelSource):
    """The kernel that PyTorch itself would launch, launched without PyTorch."""

    rank: ClassVar[int] = 30

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return PyTorch's kernel for a frequent size, where it is known."""
        if call.vector:
            return Support("x is a vector, which is another operation to PyTorch")
        if not call.frequent:
            return Support(f"PyTorch's kernel is looked for at call {calls.FREQUENT_CALLS} of a size")
        kernel = device.torch_kernels.find(call.problem, call.precision)
        if kernel is None:
            return Support("it is not known which kernel PyTorch launches")
        since = f"called directly from call {calls.FREQUENT_CALLS} on"
        return Resolution("fallback", f"{device.why_not_tuned(call)}; PyTorch's kernel, {since}", kernel)

"""Kernel source: an algorithm of the vendor's library that was found while a program ran, where that was asked for."""

from typing import ClassVar

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.operations.served_problems import is_layer
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels


class OnlineAlgorithm(KernelSource):
    """The library's fastest algorithm for a size that was never tuned."""

    rank: ClassVar[int] = 25

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return the algorithm, looked for at the first such call."""
        if device.online is None:
            return Support("no algorithms are tried at run time (TRITONGEMM_ONLINE=1)")
        if not is_layer(call.problem):
            return Support("algorithms are tried at run time for products without scales alone")
        if not isinstance(device.find_record(call.problem), Support):
            return Support("the size was tuned")
        found = device.online.find(call)
        if isinstance(found, Support):
            return found
        record = found.record
        gain = f", {record.speedup:.2f}x {record.library}" if record.speedup else ""
        return Resolution("exact", f"{record.config.name} ({record.seconds * 1e6:.2f} us{gain}; online)", found.kernel)

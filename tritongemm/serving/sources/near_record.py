"""Kernel source: the tuned kernel of another M, for a size without a row that PyTorch has no fast call of."""

from typing import ClassVar

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.source_row import describe_kernel


class NearRecord(KernelSource):
    """The kernel of the next larger M that has a row, else of the largest, for products with scales and batches."""

    rank: ClassVar[int] = 22

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return the kernel at the call's M, or why there is none that can be launched."""
        if not serves_other_m(call.problem, device.device.arch):
            return Support("rows serve other M only where PyTorch has no fast call of a product")
        found = device.find_near(call.problem)
        if isinstance(found, Support):
            return found
        record = found.row.record
        m, asked = record.problem.group_m, call.problem.group_m
        why = f"as no row has {asked}" if m != asked else "tuned with another spread of rows over groups"
        text = f"M {m}, {why}: {describe_kernel(record)} at M {m}"
        return Resolution("near", text, found.kernel, record=record, where=found.row.where)

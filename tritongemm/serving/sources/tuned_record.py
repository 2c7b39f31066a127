"""Kernel source: the tuned kernel of exactly this size, of the range of M that it is in, or of a padded M."""

from typing import ClassVar

from tritongemm.core.served_call import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.source_row import SourceRow, describe_kernel, kind_of


class TunedRecord(KernelSource):
    """A kernel, or an algorithm of a library, that won the tuning of this size, or of its range of M, on such a GPU."""

    rank: ClassVar[int] = 10

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """Return the tuned kernel, or why there is none that can be launched."""
        kernel, row = device.find_tuned(call), device.find_row(call.problem)
        if isinstance(kernel, Support):
            return kernel
        assert isinstance(row, SourceRow), "a tuned kernel has a record"
        record, text = row.record, describe_kernel(row.record)
        kind, m = kind_of(record, call.problem.m), record.problem.m
        if kind == "exact":
            return Resolution(kind, text, kernel, record=record, where=row.where)
        which = f"M {record.m_from} to {m}" if kind == "range" else f"M {m}, the padded M of {call.problem.m}"
        return Resolution(kind, f"{which}: {text} at M {m}", kernel, record=record, where=row.where)

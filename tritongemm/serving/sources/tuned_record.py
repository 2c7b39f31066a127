"""Kernel source: the tuned kernel of exactly this size, or of the range of M that it lies in."""

from __future__ import annotations

from typing import ClassVar

from tritongemm.core.record import Record
from tritongemm.core.serving import CallSignature, Resolution
from tritongemm.core.support import Support
from tritongemm.plugins.contracts import KernelSource
from tritongemm.serving.device_kernels import DeviceKernels


class TunedRecord(KernelSource):
    """A kernel, or an algorithm of a library, that won the tuning of this size, or of its range of M, on such a GPU."""

    rank: ClassVar[int] = 10

    def resolve(self, call: CallSignature, device: DeviceKernels) -> Resolution | Support:
        """The tuned kernel, or why there is none that can be launched."""
        kernel, record = device.find_tuned(call), device.find_record(call.problem)
        if isinstance(kernel, Support):
            return kernel
        assert isinstance(record, Record), "a tuned kernel has a record"
        gain = f", {record.speedup:.2f}x {record.library}" if record.speedup else ""
        text = f"{record.config.name} ({record.seconds * 1e6:.2f} us{gain})"
        if record.problem.m == call.problem.m:
            return Resolution("exact", text, kernel)
        return Resolution("range", f"M {record.m_from} to {record.problem.m}: {text} at M {record.problem.m}", kernel)

"""The kernels that one GPU can launch for calls: those of tuned records, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.serving import CallSignature, LoadedKernel
from tritongemm.core.support import Support
from tritongemm.serving import winners
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.source_row import SourceRow
from tritongemm.serving.stored_kernels import StoredKernel
from tritongemm.serving.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from tritongemm.serving.online import OnlineTuner

Binder: TypeAlias = "Callable[[int], LoadedKernel | Support]"  # The kernel of a range at an M of it, or why not.


@dataclass
class DeviceKernels:
    """The kernels that one GPU can launch for calls; sources of kernels are given this.

    Attributes:
        device: the GPU.
        records: the tuned records of all devices.
        torch_kernels: PyTorch's own kernels.
        loaded: the kernel of each tuned problem that a kernel or an algorithm won, or why it can't be launched.
        loaded_ranges: the same of records that serve a range of M, by the problem of its largest M.
        binders: what gives the kernel of another M, by the problem and the least M of a record that serves others.
        tf32: the problems whose kernels round float32 operands to tf32.
        online: what tries algorithms for sizes that were never tuned; None where that was not asked for.
    """

    device: ServingDevice
    records: RecordTable
    torch_kernels: TorchKernels
    loaded: dict[Problem, LoadedKernel | Support] = field(default_factory=dict)
    loaded_ranges: dict[Problem, LoadedKernel | Support] = field(default_factory=dict)
    binders: dict[tuple[Problem, int], Binder] = field(default_factory=dict)
    tf32: frozenset[Problem] = frozenset()
    online: OnlineTuner | None = None

    def find_row(self, problem: Problem) -> SourceRow | Support:
        """The tuned row of a problem for this GPU, or why there is none."""
        return self.records.find_row(problem, self.device.arch, self.device.compute_units)

    def loaded_for(self, record: Record) -> LoadedKernel | Support | None:
        """The kernel of a record, or why it can't be launched; None where nobody asked for it."""
        return (self.loaded_ranges if record.m_from else self.loaded).get(record.problem)

    def find_record(self, problem: Problem) -> Record | Support:
        """The tuned record of a problem for this GPU, or why there is none."""
        return self.records.find(problem, self.device.arch, self.device.compute_units)

    def find_tuned(self, call: CallSignature) -> LoadedKernel | Support:
        """The tuned kernel of this call, or why it can't be launched."""
        record = self.find_record(call.problem)
        if isinstance(record, Support):
            return record
        problem = record.problem
        kernel, where = self.loaded_for(record), f"{problem.key} on {self.device.arch}"
        if kernel is None:
            return winners.is_launchable(record)
        if isinstance(kernel, Support):
            return Support(f"{where}: {kernel}")
        if call.precision == "fp32" and problem in self.tf32:
            reason = "tuned in tf32, while PyTorch multiplies float32 in full (torch.backends.cuda.matmul.allow_tf32)"
            return Support(f"{where}: {reason}")
        if problem.m == call.problem.m and not isinstance(kernel, StoredKernel):
            return kernel
        binder = self.binders.get((problem, record.m_from))
        bound = binder(call.problem.m) if binder else Support("it serves its own M")
        return Support(f"{where}, M {call.problem.m}: {bound}") if isinstance(bound, Support) else bound

    def why_not_tuned(self, call: CallSignature) -> str:
        """Why no tuned kernel computes a call."""
        kernel = self.find_tuned(call)
        return (
            kernel.reason
            if isinstance(kernel, Support)
            else f"{call.problem.key} was resolved without its tuned kernel"
        )

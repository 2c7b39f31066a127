"""The kernels that one GPU can launch for calls: those of tuned records, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch

from tritongemm.core.errors import WorkspaceError
from tritongemm.core.launch import StridePlaces
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import CallSignature, LoadedKernel, Resolution
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.export.library.storage import KernelLibrary
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.operations.contract import Reading, Strides
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins.contracts import KernelBackend, LibraryBackend
from tritongemm.serving import winners
from tritongemm.serving.helper_kernels import HelperKernels
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.source_row import SourceRow
from tritongemm.serving.stored_kernels import LoadedCode, StoredKernel, TorchKernels, row_bits

if TYPE_CHECKING:
    from tritongemm.serving.online import OnlineTuner

Binder: TypeAlias = "Callable[[int], LoadedKernel | Support]"  # The kernel of a record at another M, or why not.
_MOST_SHARED_BYTES: Final = 64 << 20  # that programs of a kernel share at an M at which it was not tuned


class NearKernel(NamedTuple):
    """A kernel at an M that no row has, and the row that it is of."""

    kernel: LoadedKernel
    row: SourceRow


@dataclass
class DeviceKernels:
    """The kernels that one GPU can launch for calls; sources of kernels are given this."""

    device: ServingDevice  # the GPU
    records: RecordTable  # the tuned records of all devices
    torch_kernels: TorchKernels  # PyTorch's own kernels
    # The kernel of each tuned problem that a kernel or an algorithm won, or why it can't be launched.
    loaded: dict[Problem, LoadedKernel | Support] = field(default_factory=dict)
    # The same of records that serve a range of M, by the problem of its largest M.
    loaded_ranges: dict[Problem, LoadedKernel | Support] = field(default_factory=dict)
    # What gives the kernel of another M, by the problem and the least M of a record that serves others.
    binders: dict[tuple[Problem, int], Binder] = field(default_factory=dict)
    tf32: frozenset[Problem] = frozenset()  # the problems whose kernels round float32 operands to tf32
    # Shipped rows, whose kernels the first call of their product loads, by its problem with an M of 1.
    waiting: dict[Problem, list[SourceRow]] = field(default_factory=dict)
    # What tries algorithms for sizes that were never tuned; None where that was not asked for.
    online: OnlineTuner | None = None
    libraries: tuple[KernelLibrary, ...] = ()  # those that were loaded, the latest last
    loaded_code: LoadedCode = field(default_factory=LoadedCode)  # code of libraries on the GPU
    # Loads the kernel of a record that is in no table, or says why it can't be launched.
    load_record: Callable[[Record], LoadedKernel | Support] = field(default=lambda record: Support("nothing loads it"))
    # Whether rows are invariant as they state, by the name of a config and the product with an M of 1.
    row_checks: dict[tuple[str, Problem], Support] = field(default_factory=dict)
    # Kernels whose rows are invariant, with their records, at problems that no row holds for.
    untuned: dict[Problem, tuple[Record, LoadedKernel | Support]] = field(default_factory=dict)

    @cached_property
    def helpers(self) -> HelperKernels:
        """The kernels beside the products."""
        return HelperKernels(self.device, self.libraries, self.loaded_code)

    @property
    def target(self) -> Target:
        """Facts of the GPU's architecture; errors are those of `HelperKernels.target`."""
        return self.helpers.target

    def row_bits(self, kernel: LoadedKernel, problem: Problem) -> str | Support:
        """Return the hash of a row that a kernel computes on this GPU, as of `shared_rows`."""
        with torch.cuda.device(self.device.index):
            return row_bits(kernel, problem, self.device)

    def find_row(self, problem: Problem) -> SourceRow | Support:
        """Return the tuned row of a problem for this GPU, or why there is none."""
        return self.records.find_row(problem, self.device.arch, self.device.compute_units)

    def loaded_for(self, record: Record) -> LoadedKernel | Support | None:
        """Return the kernel of a record, or why it can't be launched; None where it was not loaded yet."""
        return (self.loaded_ranges if record.m_from else self.loaded).get(record.problem)

    def has_kernel(self, problem: Problem) -> bool:
        """Return whether a kernel won the row of a problem, and can be launched."""
        record = self.find_record(problem)
        return not isinstance(record, Support) and not isinstance(self.bind(record, problem.m), Support)

    def is_algorithm(self, record: Record) -> bool:
        """Return whether an algorithm of a library won a record, other than what the library itself chooses."""
        return isinstance(winners.find_winner(record), LibraryBackend) and not winners.baseline_won(record)

    def served_seconds(self, record: Record) -> float | None:
        """Return the seconds of what computes a record's problem here: the library's where a kernel is refused."""
        is_refused = isinstance(self.loaded_for(record), Support)
        return record.library_seconds if is_refused else record.served_seconds

    def find_record(self, problem: Problem) -> Record | Support:
        """Return the tuned record of a problem for this GPU, or why there is none."""
        return self.records.find(problem, self.device.arch, self.device.compute_units)

    def find_tuned(self, call: CallSignature) -> LoadedKernel | Support:
        """Return the tuned kernel of this call, or why it can't be launched."""
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
        bound = self.bind(record, call.problem.group_m)
        return Support(f"{where}, M {call.problem.m}: {bound}") if isinstance(bound, Support) else bound

    def bind(self, record: Record, m: int) -> LoadedKernel | Support:
        """Return the kernel of a record at an M, or why it can't be launched there."""
        kernel = self.loaded_for(record)
        if kernel is None:
            return winners.is_launchable(record)
        if isinstance(kernel, Support):
            return kernel
        if m == record.problem.group_m and not isinstance(kernel, StoredKernel):
            return kernel
        binder = self.binders.get((record.problem, record.m_from))
        bound = binder(m) if binder else Support("it serves its own M")
        return bound if isinstance(bound, Support) else self._with_memory(bound)

    def _with_memory(self, kernel: LoadedKernel) -> LoadedKernel | Support:
        """Return a kernel, once there is memory for what its programs share, which may grow with M."""
        workspace, counters = kernel.bytes("workspace"), kernel.bytes("semaphore")
        pool = self.device.workspaces
        if not (workspace or counters) or (pool is not None and pool.holds(workspace, counters)):
            return kernel
        if workspace > _MOST_SHARED_BYTES:
            return Support(f"its programs would share {workspace} bytes, more than {_MOST_SHARED_BYTES}")
        if torch.cuda.is_current_stream_capturing():
            return Support("its programs share memory that can't be had while a graph is captured")
        try:
            held = (pool.workspace_bytes, pool.counter_bytes) if pool is not None else (0, 0)
            self.device.reserve_workspaces(max(workspace, held[0]), max(counters, held[1]))
        except WorkspaceError as error:
            return Support(str(error))
        return kernel

    def near_rows(self, problem: Problem) -> list[SourceRow]:
        """Return the rows that may serve a problem at other M, the nearest first; see `serves_other_m`."""
        if not serves_other_m(problem, self.device.arch):
            return []
        return self.records.near_rows(problem, self.device.arch, self.device.compute_units)

    def find_near(self, problem: Problem) -> NearKernel | Support:
        """Return the kernel of the nearest row of a product that can be launched at a problem's M, or why none can.

        The row of the next larger M counts, else that of the largest. Where its kernel can't be launched the next row
        is asked, unless PyTorch's own product of groups won there.
        """
        refusal = Support(f"{problem.key} was never tuned for {self.device.arch}, at any M")
        for at, row in enumerate(self.near_rows(problem)):
            record = row.record
            if problem.kind == "grouped" and winners.baseline_won(record) and not record.predicted:
                return Support(f"{record.problem.key}: PyTorch's own product won there")
            kernel = self.bind(record, problem.group_m)
            if not isinstance(kernel, Support):
                return NearKernel(kernel, row)
            refusal = refusal if at else Support(f"{record.problem.key}: {kernel}")
        return refusal

    def move(self, resolution: Resolution, problem: Problem, reading: Reading) -> Resolution:
        """Return a resolution whose kernel reads operands of the strides of a call, or PyTorch's where it can't."""
        kernel, record = resolution.kernel, resolution.record
        if kernel is None or record is None:
            return resolution if kernel is None else replace(resolution, kernel=None)
        strides = reading.moved(record.problem.at(problem.m))
        if not strides:
            return resolution
        moved = _moved(kernel, record, problem.m, strides)
        if isinstance(moved, Support):
            return Resolution("fallback", f"{problem.key}: {moved}")
        return replace(resolution, kernel=moved)

    def why_not_tuned(self, call: CallSignature) -> str:
        """Return why no tuned kernel computes a call."""
        kernel = self.find_tuned(call)
        return (
            kernel.reason
            if isinstance(kernel, Support)
            else f"{call.problem.key} was resolved without its tuned kernel"
        )


def _moved(kernel: LoadedKernel, record: Record, m: int, strides: Mapping[str, Strides]) -> LoadedKernel | Support:
    """Return a record's kernel, which is bound to an M, for operands of other strides."""
    if not isinstance(kernel, TunedKernel):
        return Support(f"{record.winner} reads dense operands alone; {', '.join(strides)} have other strides")
    places = kernel.strides or _stride_places(record, record.problem.at(m))
    launch = places if isinstance(places, Support) else places.move(kernel.launch, strides)
    return launch if isinstance(launch, Support) else replace(kernel, launch=launch)


def _stride_places(record: Record, problem: Problem) -> StridePlaces | Support:
    """Return where launches of a record's kernel have the strides of operands, by its backend."""
    backend = winners.find_winner(record)
    if isinstance(backend, Support):
        return backend  # a machine that serves a library may lack what the backend needs
    if not isinstance(backend, KernelBackend):
        return Support(f"{record.winner} reads dense operands alone")
    return backend.stride_places(record.config, problem)

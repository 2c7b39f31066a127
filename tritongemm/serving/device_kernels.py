"""The kernels that one GPU can launch for calls: those of tuned records, PyTorch's own, and those beside products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tritongemm.core.errors import InputError, UnavailableError, WorkspaceError
from tritongemm.core.helper_kernel import HelperArguments, HelperKernel
from tritongemm.core.launch import Launch, StridePlaces
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import CallSignature, LoadedKernel, PatchedLaunch, Resolution
from tritongemm.core.support import Support
from tritongemm.core.target import Target
from tritongemm.export.library.storage import KernelLibrary
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.operations.contract import Reading, Strides
from tritongemm.operations.torch_limits import serves_other_m
from tritongemm.plugins.contracts import KernelBackend, LibraryBackend
from tritongemm.serving import source_row
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.source_row import SourceRow, baseline_won
from tritongemm.serving.stored_kernels import LoadedCode, StoredKernel, TorchKernels, row_bits
from tritongemm.system import settings

if TYPE_CHECKING:
    from tritongemm.serving.online import OnlineTuner

_LOG = logging.getLogger("tritongemm")
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


@dataclass
class HelperKernels:
    """The kernels beside the products that one GPU can launch; of its libraries the latest is the last."""

    device: ServingDevice
    libraries: Sequence[KernelLibrary] = ()
    loaded: LoadedCode = field(default_factory=LoadedCode)
    _kernels: dict[str, TunedKernel] = field(default_factory=dict, init=False)

    @cached_property
    def target(self) -> Target:
        """Facts of the GPU's architecture, by a library or by the files of search_spaces.

        Raises:
            UnavailableError: no library has them, and nothing reads the files here.
        """
        arch = self.device.arch
        for library in reversed(self.libraries):
            if arch in library.targets:
                return library.targets[arch]
        try:
            from tritongemm.search_spaces import loader  # which reads YAML
        except ImportError as error:
            advice = "build the library with this version, or install PyYAML"
            raise UnavailableError(
                f"no library that is loaded has the facts of {arch}, and {error}; {advice}"
            ) from None
        return loader.load_target(arch)

    def prepare(self, helper: HelperKernel, arguments: HelperArguments) -> PatchedLaunch:
        """Return a launch for one thread.

        Raises:
            UnavailableError: no library has the kernel, and it can't be compiled here; or it would have to be loaded
                while a graph is captured.
            InputError: it can't be compiled, or launched so.
            DriverError: it can't be loaded.
        """
        with torch.cuda.device(self.device.index):
            self.device.driver_device.make_current()
            kernel = self._kernel(helper, arguments)
            launch = arguments.given_to(kernel.launch, helper)
            if fault := launch.fault(self.target):
                raise InputError(f"{helper.name} can't be launched on {self.target.name}: {fault}")
            return TunedKernel(launch, kernel.function).prepare(self.device.driver_device)

    def _kernel(self, helper: HelperKernel, arguments: HelperArguments) -> TunedKernel:
        """Return the loaded kernel, with a launch of any grid and numbers."""
        digest = helper.digest(self.device.arch)
        if digest not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise UnavailableError(f"{helper.name} is loaded by its first call, not while a graph is captured")
            with self.loaded.lock:
                if digest not in self._kernels:
                    found = self._load_stored(helper, digest) or self._load_compiled(helper, arguments)
                    self._kernels[digest] = found
        return self._kernels[digest]

    def _load_stored(self, helper: HelperKernel, digest: str) -> TunedKernel | None:
        """Return the kernel of a library; None where none has it undamaged."""
        for library in reversed(self.libraries):
            stored = library.helpers.get((self.device.arch, digest))
            if stored is None:
                continue
            try:
                return self._loaded(stored.launch, library.read_code(stored))
            except InputError as error:
                _LOG.warning("%s is not taken from a library: %s", helper.name, error)
        return None

    def _load_compiled(self, helper: HelperKernel, arguments: HelperArguments) -> TunedKernel:
        held = f"no library that is loaded has {helper} for {self.device.arch}"
        try:
            from tritongemm.build import helpers
            from tritongemm.build.cache import ArtifactCache

            artifact = helpers.compile_helper(helper, self.target, ArtifactCache(settings.cache_folder()))
            launch = helpers.launch_helper(artifact, helper, arguments, self.target)
        except (UnavailableError, ImportError) as error:
            raise UnavailableError(f"{held}, and it can't be compiled here: {error}") from None
        return self._loaded(launch, launch.read_code())

    def _loaded(self, launch: Launch, code: bytes) -> TunedKernel:
        return TunedKernel(launch, self.loaded.function(self.device, code, launch))


class HelperCall:
    """A kernel beside the products, made ready for one thread of a GPU."""

    __slots__ = ("_index", "_launch", "_setters")

    def __init__(self, prepared: PatchedLaunch, index: int) -> None:
        self._setters, self._launch, self._index = prepared.setters, prepared.launch, index

    def __call__(self, operands: Mapping[str, Tensor]) -> None:
        """Launch on operands by their names, in order of the current stream of the GPU, which is the current device."""
        for name, tensor in operands.items():
            self._setters[name](tensor.data_ptr())
        self._launch(_stream(self._index))


Binder: TypeAlias = "Callable[[int], LoadedKernel | Support]"  # The kernel of a record at another M, or why not.
_MOST_TIMES_ROWS: Final = 4  # rows of A, over those of tuning, that kernels with one a program are worth
_STEP_SECONDS: Final = 2e-6  # that an activation by itself takes in a graph, at least
_STEP_RATE: Final = 5e12  # bytes a second that it reads and writes
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

    def span(self, problem: Problem, others: Iterable[Problem] = ()) -> range:
        """Return the M that a problem's row serves, if no other row of it, or of the others, is among them; else none.

        Of an algorithm of a library they are those at which it would have to be loaded: all but the row's own.
        """
        record = self.find_record(problem)
        if isinstance(record, Support) or not record.m_from:
            return range(0)
        found = range(record.m_from, record.problem.m + 1)
        every = (self.records.near_rows(p, self.device.arch, self.device.compute_units) for p in (problem, *others))
        beside = [row.record for rows in every for row in rows if row.record is not record]
        if any(r.problem.m >= found.start and (r.m_from or r.problem.m) < found.stop for r in beside):
            return range(0)
        return found[:-1] if self.is_algorithm(record) else found

    def library_span(self, problem: Problem) -> range:
        """Return the same of a problem for which PyTorch, or an algorithm of its library, was the fastest."""
        record = self.find_record(problem)
        won = isinstance(record, Record) and (baseline_won(record) or self.is_algorithm(record))
        return self.span(problem) if won else range(0)

    def loaded_for(self, record: Record) -> LoadedKernel | Support | None:
        """Return the kernel of a record, or why it can't be launched; None where it was not loaded yet."""
        return (self.loaded_ranges if record.m_from else self.loaded).get(record.problem)

    def has_kernel(self, problem: Problem) -> bool:
        """Return whether a kernel won the row of a problem, and can be launched."""
        record = self.find_record(problem)
        if isinstance(record, Support) or self.loses_to_two_steps(record):
            return False
        return not isinstance(self.bind(record, problem.m), Support)

    def loses_to_two_steps(self, record: Record) -> bool:
        """Return whether the tuned product and one more kernel, which records know no time of, beat an epilogue.

        A product's row of a range that ends above the record's M has a time that is little longer than there. Of groups
        the two steps without a row are PyTorch's; `fused_moe`, which has tuned ones, compares both rows itself.
        """
        p, first = record.problem, record.problem.without_epilogue
        plain = self.find_record(first) if p != first and not p.groups else Support("there are no two tuned steps")
        if isinstance(plain, Support):
            return False
        seconds = self.served_seconds(plain)
        step = _STEP_SECONDS + p.m * (p.n * first.c.type.bytes + p.columns * p.c.type.bytes) / _STEP_RATE
        return seconds is not None and record.served_seconds > seconds + step

    def is_algorithm(self, record: Record) -> bool:
        """Return whether an algorithm of a library won a record, other than what the library itself chooses."""
        return isinstance(source_row.find_winner(record), LibraryBackend) and not baseline_won(record)

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
        if self.loses_to_two_steps(record):
            return Support(f"the tuned product and one more kernel are faster than {problem.epilogue} within it")
        kernel, where = self.loaded_for(record), f"{problem.key} on {self.device.arch}"
        if kernel is None:
            return source_row.is_launchable(record)
        if isinstance(kernel, Support):
            return Support(f"{where}: {kernel}")
        if call.precision == "fp32" and problem in self.tf32:
            reason = "tuned in tf32, while PyTorch multiplies float32 in full (torch.backends.cuda.matmul.allow_tf32)"
            return Support(f"{where}: {reason}")
        m = call.problem.group_m
        if not call.frequent and m != problem.group_m and self.is_algorithm(record):
            return Support(f"{where}, M {m}: a library's algorithm takes milliseconds to load; few calls are of this M")
        bound = self.bind(record, m)
        return Support(f"{where}, M {call.problem.m}: {bound}") if isinstance(bound, Support) else bound

    def bind(self, record: Record, m: int) -> LoadedKernel | Support:
        """Return the kernel of a record at an M, or why it can't be launched there."""
        kernel = self.loaded_for(record)
        if kernel is None:
            return source_row.is_launchable(record)
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
        is asked, unless PyTorch's own product of groups won there. So it is where a kernel with one row of A a program
        would read weights for many more rows than it was tuned for.
        """
        refusal = Support(f"{problem.key} was never tuned for {self.device.arch}, at any M")
        for at, row in enumerate(self.near_rows(problem)):
            record = row.record
            if problem.kind == "grouped" and baseline_won(record) and not record.predicted:
                return Support(f"{record.problem.key}: PyTorch's own product won there")
            most = _MOST_TIMES_ROWS * record.problem.group_m if record.config.block_m == 1 else problem.group_m
            few = Support(f"its kernel, with one row of A a program, is for {most} rows at most")
            kernel = self.bind(record, problem.group_m) if problem.group_m <= most else few
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
    backend = source_row.find_winner(record)
    if isinstance(backend, Support):
        return backend  # a machine that serves a library may lack what the backend needs
    if not isinstance(backend, KernelBackend):
        return Support(f"{record.winner} reads dense operands alone")
    return backend.stride_places(record.config, problem)

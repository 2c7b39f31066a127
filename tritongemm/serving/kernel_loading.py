"""Loads tuned records on a GPU as kernels that it can launch: compiled where the cache lacks them, and checked."""

import logging
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.prepare import PreparedKernel, or_refusal, prepare_kernels
from tritongemm.core.errors import WorkspaceError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import LoadedKernel
from tritongemm.core.support import Support
from tritongemm.export.library.storage import KernelLibrary
from tritongemm.hip_ext.driver.module import Function
from tritongemm.hip_ext.host_calls.shared_object import PreparedCall
from tritongemm.hip_ext.launching import native_calls
from tritongemm.hip_ext.launching.loaded_kernels import HostLaunchedKernel, TunedKernel
from tritongemm.operations.torch_products import float32_precision
from tritongemm.plugins.contracts import KernelBackend, LibraryBackend
from tritongemm.serving import source_row, stored_kernels
from tritongemm.serving.device_kernels import Binder, DeviceKernels
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.serving_device import ServingDevice, open_device
from tritongemm.serving.source_row import SourceRow
from tritongemm.serving.stored_kernels import StoredKernel, TorchKernels
from tritongemm.system import settings

_LOG = logging.getLogger("tritongemm")
_MOST_NAMED = 10  # records that a warning names


def load_device(
    index: int, records: RecordTable, former: DeviceKernels | None = None, libraries: tuple[KernelLibrary, ...] = ()
) -> DeviceKernels:
    """Return the kernels that a GPU can launch for tuned records."""
    with torch.cuda.device(index):
        native_calls.load()
        device = open_device(index, former.device.workspaces if former else None)
        records = records.of_gpu(device.arch, device.compute_units, device.memory_gbps)
        found, ready = DeviceKernels(device, records, TorchKernels(device), libraries=libraries), list[SourceRow]()
        found.load_record = partial(_load_one, device)
        found.loaded_code = former.loaded_code if former else found.loaded_code
        if settings.online():
            from tritongemm.serving import online

            found.online = online.open_tuner(device)
        for row in found.records.list_rows(device.arch, device.compute_units):
            if row.shipped_for:
                found.waiting.setdefault(row.record.problem.at(1), []).append(row)
            else:
                ready.append(row)
        _add_rows(found, ready)
    return found


def load_waiting(found: DeviceKernels, problems: Iterable[Problem]) -> None:
    """Load the kernels of shipped rows that wait for the first call of one of these products."""
    products = {problem.at(1) for problem in problems} & found.waiting.keys()
    rows = [row for product in products for row in found.waiting[product]]
    with torch.cuda.device(found.device.index):
        refused = or_refusal(partial(_add_rows, found, rows))
    if isinstance(refused, Support):  # such as a cache that can't be written: calls go on by PyTorch
        found.loaded_ranges |= {row.record.problem: refused for row in rows}
        _LOG.warning("PyTorch computes %s: %s", "; ".join(product.product for product in products), refused)
    for product in products:
        del found.waiting[product]  # last, as other threads see by it that they must wait


def _add_rows(found: DeviceKernels, rows: Sequence[SourceRow]) -> None:
    """Add the kernels of rows to what a GPU, the current one, can launch."""
    tuned = [row.record for row in rows if row.code is None]
    launchable = [record for record in tuned if source_row.is_launchable(record)]
    padded = frozenset(row.record.problem for row in rows if row.padded)
    kernels, own = load_kernels(found.device, [record for record in launchable if not record.m_from], padded)
    of_ranges, ranges = load_kernels(found.device, [record for record in launchable if record.m_from])
    found.loaded |= kernels
    found.loaded_ranges |= of_ranges
    found.binders |= {(problem, 0): binder for problem, binder in own.items()}
    least = {record.problem: record.m_from for record in launchable if record.m_from}
    found.binders |= {(problem, least[problem]): binder for problem, binder in ranges.items()}
    found.tf32 |= {record.problem for record in launchable if source_row.rounds_to_tf32(record)}
    _add_stored(found, rows)
    for problem in (record.problem for record in tuned if source_row.baseline_won(record)):
        found.torch_kernels.find(problem, float32_precision() if problem.a.dtype == "fp32" else "fp32")


def _add_stored(found: DeviceKernels, rows: Sequence[SourceRow]) -> None:
    """Add the kernels that libraries hold for a GPU to what it can launch, with workspaces for them."""
    for row in rows:
        if row.code is None:
            continue
        record, kernel = row.record, StoredKernel(found.device, row.record, row.code, found.loaded_code)
        (found.loaded_ranges if record.m_from else found.loaded)[record.problem] = kernel
        found.binders[record.problem, record.m_from] = kernel.at
        if row.code.kernel.tf32:
            found.tf32 |= {record.problem}
    for kernels in (found.loaded, found.loaded_ranges):
        _reserve_workspaces(found.device, kernels)


def load_kernels(
    device: ServingDevice, records: Sequence[Record], padded: Collection[Problem] = ()
) -> tuple[dict[Problem, LoadedKernel | Support], dict[Problem, Binder]]:
    """Return each record's kernel on a GPU, or why it can't be launched; and what gives it at the M it also serves.

    `padded` has the problems of those that serve other M too, though they name no range.
    """
    compiled = [r for r in records if isinstance(source_row.find_winner(r), KernelBackend)]
    kernels, binders = _load_compiled(device, compiled, padded)
    for record in (r for r in records if r.problem not in kernels):
        kernels[record.problem] = or_refusal(partial(_load_algorithm, device, record))
        if record.m_from or record.problem in padded:
            binders[record.problem] = partial(_load_algorithm_at, device, record)
    _reserve_workspaces(device, kernels)
    for record in records:
        kernel = kernels[record.problem]
        if not isinstance(kernel, Support) and _needs_check(record, kernel):
            check = stored_kernels.check_once if isinstance(kernel, TunedKernel) else stored_kernels.check_kernel
            support = or_refusal(partial(check, kernel, record, device))  # type: ignore[arg-type]
            if not support:
                kernels[record.problem] = support
    _warn_of_refused(kernels)
    return kernels, binders


def _load_one(device: ServingDevice, record: Record) -> LoadedKernel | Support:
    with torch.cuda.device(device.index):
        return load_kernels(device, [record])[0][record.problem]


def _reserve_workspaces(device: ServingDevice, kernels: dict[Problem, LoadedKernel | Support]) -> None:
    """Reserve memory for the kernels; where there is too little for counters, the largest are given up."""
    while loaded := {problem: kernel for problem, kernel in kernels.items() if not isinstance(kernel, Support)}:
        needs = [max(kernel.bytes(buffer) for kernel in loaded.values()) for buffer in ("workspace", "semaphore")]
        if not any(needs):
            return
        try:
            return device.reserve_workspaces(*needs)
        except WorkspaceError as error:
            kernels |= {p: Support(str(error)) for p, k in loaded.items() if k.bytes("semaphore") == needs[1]}


def _warn_of_refused(kernels: dict[Problem, LoadedKernel | Support]) -> None:
    """Warn once of the sizes that have a tuned kernel which can't be launched."""
    reasons = [f"{problem.key}: {kernel}" for problem, kernel in kernels.items() if isinstance(kernel, Support)]
    if reasons:
        more = [f"and {len(reasons) - _MOST_NAMED} more, see tritongemm.explain"] if len(reasons) > _MOST_NAMED else []
        text = "; ".join([*reasons[:_MOST_NAMED], *more])
        warnings.warn(f"PyTorch computes {len(reasons)} of {len(kernels)} tuned sizes: {text}", stacklevel=2)


def made_by_other_triton(record: Record) -> bool:
    """Return whether another Triton than the one installed made a record, so that its kernel must be checked again."""
    return record.toolchain.get("triton") != settings.version("triton")


def _needs_check(record: Record, kernel: LoadedKernel) -> bool:
    # A library loads its kernel when it is first called, which must not be while a graph is captured.
    loads_late = isinstance(kernel, HostLaunchedKernel) or isinstance(source_row.find_winner(record), LibraryBackend)
    return loads_late or made_by_other_triton(record)


def _load_compiled(
    device: ServingDevice, records: Sequence[Record], padded: Collection[Problem]
) -> tuple[dict[Problem, LoadedKernel | Support], dict[Problem, Binder]]:
    """Return the compiled kernel of each record, and the binders of those that serve other M; arguments as above."""
    kernels: dict[Problem, LoadedKernel | Support] = {}
    binders: dict[Problem, Binder] = {}
    if not records:
        return kernels, binders
    from tritongemm.hip_ext import machine

    target = machine.find_machine(None, str(device.index)).target
    functions: dict[tuple[str, str], Function] = {}
    for problem, prepared in prepare_kernels(records, target, ArtifactCache(settings.cache_folder())).items():
        if isinstance(prepared, Support):
            kernels[problem] = prepared
            continue
        kernels[problem] = kernel = or_refusal(partial(_load_code, device, prepared.launch, functions))
        if isinstance(kernel, Support):
            continue
        if prepared.record.m_from or problem in padded:
            support = or_refusal(partial(prepared.serves, prepared.record.m_from or 1))
            least = prepared.record.m_from or 1
            binders[problem] = partial(_bind, prepared, kernel, least) if support else partial(_refuse, support)
        else:
            binders[problem] = partial(_bind, prepared, kernel, problem.group_m)
    return kernels, binders


def _load_code(
    device: ServingDevice, launch: Launch | HostLaunch, functions: dict[tuple[str, str], Function]
) -> LoadedKernel:
    """Return a compiled kernel on a GPU; `functions` holds what is loaded, by file and symbol."""
    if isinstance(launch, HostLaunch):
        PreparedCall(launch, {})
        return HostLaunchedKernel(launch)
    key = launch.path, launch.symbol
    if key not in functions:
        functions[key] = device.driver_device.load(launch.read_code()).function(launch.symbol)
        _ = functions[key].attributes  # The driver may load code late; a capture must not be the first to ask for it.
    return TunedKernel(launch, functions[key])


def _bind(prepared: PreparedKernel, kernel: LoadedKernel, least: int, m: int) -> LoadedKernel | Support:
    """Return a loaded kernel at another M; from the least one to its own its binary is known to be right."""
    if not least <= m <= prepared.record.problem.group_m:
        carries = or_refusal(partial(prepared.serves, m))
        if not carries:
            return carries
    launch = prepared.launch_at(m)
    if isinstance(launch, Support):
        return launch
    return HostLaunchedKernel(launch) if isinstance(launch, HostLaunch) else replace(kernel, launch=launch)  # type: ignore[type-var]


def _refuse(support: Support, m: int) -> Support:
    """Return the answer of a record whose kernel can't serve its range."""
    return support


def _load_algorithm(device: ServingDevice, record: Record) -> LoadedKernel | Support:
    winner = source_row.find_winner(record)
    if not isinstance(winner, LibraryBackend):
        return Support(f"its winner {record.winner} can't be called from here")
    return winner.load(record, device.index, device.driver_device)


def _load_algorithm_at(device: ServingDevice, record: Record, m: int) -> LoadedKernel | Support:
    """Return a library's algorithm at another M, loaded and checked at the first call of it."""
    if torch.cuda.is_current_stream_capturing():
        return Support("its algorithm is loaded at the first call of this M, and not while a graph is captured")
    here = replace(record, problem=record.problem.at(m), m_from=0)
    kernel = or_refusal(partial(_load_algorithm, device, here))
    if isinstance(kernel, Support):
        return kernel
    checked = or_refusal(partial(stored_kernels.check_kernel, kernel, here, device))
    return kernel if checked else checked

"""Kernels of libraries on a GPU, PyTorch's among them, loaded by their first call, and the check of a loaded kernel."""

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import torch

from tritongemm.build.prepare import or_refusal
from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.launch import Launch
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.served_call import LoadedKernel, PatchedLaunch
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.export.library.entry import record_m
from tritongemm.export.library.storage import StoredCode
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.launching.loaded_kernels import TunedKernel
from tritongemm.numerics import shared_rows, verify
from tritongemm.operations.served_problems import is_layer
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, LibraryBackend
from tritongemm.serving.launching import PatchedCall
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.system import settings
from tritongemm.system.compiled_files import CompiledFiles

# A kernel may deviate by this factor of the error that its record was accepted with, where --errRatio let that be
# beyond the tolerance.
ACCEPTED_ERROR_FACTOR = 1.1
_MOST_KERNELS = 8192  # of PyTorch, kept for one device; sequences of any length must not fill the memory.


def check_kernel(kernel: LoadedKernel, record: Record, device: ServingDevice) -> Support:
    """Return whether a kernel computes its problem with the tools that are installed, or what is wrong with it."""
    tools = f"Triton {settings.version('triton')}, torch {settings.version('torch')}"
    problem = record.problem
    family = registry.get(Family, problem.family)
    try:
        operands = family.make_inputs(problem, str(device.torch_device))
        c = torch.empty(
            problem.operands["c"].extents, dtype=getattr(torch, problem.c.type.torch), device=device.torch_device
        )
        call = PatchedCall(kernel, device, c.shape, c.dtype)
        run = partial(call.start_on, {name: tensor.data_ptr() for name, tensor in (operands | {"c": c}).items()})
        result = verify.verify(problem, family, run, c, family.reference(problem, operands))
    except (TritonGemmError, torch.cuda.OutOfMemoryError) as error:
        return Support(f"could not be checked with {tools}: {error}")
    accepted = max(result.tolerance, ACCEPTED_ERROR_FACTOR * (record.error or 0.0))
    return SUPPORTED if result.error <= accepted else Support(f"wrong with {tools}: {result.reason}")


def row_bits(kernel: LoadedKernel, problem: Problem, device: ServingDevice) -> str | Support:
    """Return the hash of a row that a kernel computes, as of `shared_rows`."""
    try:
        operands = shared_rows.make_operands(problem, str(device.torch_device))
        c = operands["c"]
        verify.poison(c)
        PatchedCall(kernel, device, c.shape, c.dtype).start_on({n: t.data_ptr() for n, t in operands.items()})
        torch.cuda.synchronize()
    except (TritonGemmError, torch.cuda.OutOfMemoryError) as error:
        return Support(f"its bits could not be compared: {error}")
    return shared_rows.hash_rows(problem, c)


def check_once(kernel: TunedKernel, record: Record, device: ServingDevice) -> Support:
    """Return what `check_kernel` does; the cache keeps which code was right for a size on which kind of device."""
    kept = CompiledFiles(settings.cache_folder())
    what = f"{kernel.launch.sha256} {record.config.name} {record.problem.key} {device.arch} {device.compute_units}"
    key = sha256(f"checked {what}".encode()).hexdigest()
    if kernel.launch.sha256 and kept.find(key):
        return SUPPORTED
    found = check_kernel(kernel, record, device)
    if found:
        with suppress(TritonGemmError):  # a cache that can't be written costs another check
            kept.keep(key, {}, {"checked": what})
    return found


_LOG = logging.getLogger("tritongemm")


@dataclass
class LoadedCode:
    """Functions that are loaded on one GPU, by their code object and name, as entries may share one."""

    functions: dict[tuple[str, str], driver.Function] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def function(self, device: ServingDevice, code: bytes, launch: Launch) -> driver.Function:
        """Return the function of a launch, loaded by the first caller."""
        key = launch.sha256, launch.symbol
        if key not in self.functions:
            with torch.cuda.device(device.index), device.driver_device.relaxed():
                function = device.driver_device.load(code).function(launch.symbol)
                _ = function.attributes  # The driver may load code late, which must not be during a capture.
                self.functions[key] = function
        return self.functions[key]


class StoredKernel:
    """A library's kernel on a GPU; it is read, and its hash compared, when it is first called."""

    def __init__(self, device: ServingDevice, record: Record, code: StoredCode, loaded: LoadedCode) -> None:
        self._device, self._record, self._code, self._loaded = device, record, code, loaded
        self._answer: driver.Function | Support | None = None

    def bytes(self, buffer: str) -> int:
        """Return the most bytes of a buffer that the runtime owns, ``workspace`` or ``semaphore``."""
        return self._code.kernel.launches.most_bytes(buffer, record_m(self._record))

    def prepare(self, device: driver.Device) -> PatchedLaunch:
        """Return a launch for one thread, at its record's M.

        Raises:
            InputError: its code is damaged, or can't be loaded.
        """
        kernel = self.at(record_m(self._record))
        if isinstance(kernel, Support):
            raise InputError(kernel.reason)
        return kernel.prepare(device)

    def at(self, m: int) -> LoadedKernel | Support:
        """Return the loaded kernel at an M, or why it can't be launched."""
        launch = self._code.kernel.launches.at(m)
        if isinstance(launch, Support):
            return launch
        function = self._function()
        return function if isinstance(function, Support) else TunedKernel(launch, function, self._code.kernel.strides)

    def _function(self) -> driver.Function | Support:
        """Return the kernel's code on the GPU, loaded by the first caller."""
        if self._answer is None:
            if torch.cuda.is_current_stream_capturing():
                return Support("its code is loaded by the first call, and not while a graph is captured")
            with self._loaded.lock:
                if self._answer is None:
                    self._answer = or_refusal(self._load)
                    if isinstance(self._answer, Support):
                        _LOG.warning("PyTorch computes %s: %s", self._record.problem.key, self._answer)
        return self._answer

    def _load(self) -> driver.Function | Support:
        launch = self._code.kernel.launches.launch
        function = self._loaded.functions.get((launch.sha256, launch.symbol))
        function = function or self._loaded.function(self._device, self._code.read(), launch)
        checked = self._check(function)
        return function if checked else checked

    def _check(self, function: driver.Function) -> Support:
        """Return whether it is correct; only a kernel that another Triton compiled since it was measured is checked."""
        launches, record = self._code.kernel.launches, self._record
        launch = launches.at(record_m(record))
        if self._code.kernel.toolchain.get("triton") == record.toolchain.get("triton"):
            return SUPPORTED
        if isinstance(launch, Support):
            return launch
        with torch.cuda.device(self._device.index):
            return check_kernel(TunedKernel(launch, function), record, self._device)


class TorchKernels:
    """PyTorch's kernels on one device, each looked for once."""

    def __init__(self, device: ServingDevice) -> None:
        self._device = device
        self._libraries = registry.every(LibraryBackend)
        self._kernels: dict[tuple[Problem, str], LoadedKernel | None] = {}
        self._lock = threading.Lock()

    def find(self, problem: Problem, precision: str) -> LoadedKernel | None:
        """Return the kernel that PyTorch launches for a problem, float32 multiplied as ``fp32`` or ``tf32``.

        Returns:
            None where it isn't known which kernel that is, as of every product with scales, or where it is looked for
            first during a capture.
        """
        key = problem, precision
        if not is_layer(problem):
            return None
        if key not in self._kernels:
            with torch.cuda.device(self._device.index):
                if torch.cuda.is_current_stream_capturing():
                    return None
                with self._lock:
                    if key not in self._kernels:  # Another thread may have looked for it meanwhile.
                        if len(self._kernels) >= _MOST_KERNELS:
                            self._kernels.clear()
                        self._kernels[key] = self._load(*key)
        return self._kernels.get(key)

    def _load(self, problem: Problem, precision: str) -> LoadedKernel | None:
        """Return the kernel from the first library that knows it, with workspaces for it."""
        device = self._device
        try:  # Whatever goes wrong, PyTorch itself is there.
            with device.driver_device.relaxed():
                for library in self._libraries:
                    found = library.default_kernel(problem, precision, device.index, device.driver_device)
                    if found is not None:
                        self._reserve(*found)
                        return found[0]
        except (TritonGemmError, LookupError):
            pass
        return None

    def _reserve(self, kernel: LoadedKernel, workspace_bytes: int) -> None:
        """Have a workspace for a kernel, as large as PyTorch gives the library, so that the next kernel finds it."""
        device, needed = self._device, kernel.bytes("workspace")
        pool = device.workspaces
        if needed > (pool.workspace_bytes if pool else 0):
            device.reserve_workspaces(workspace_bytes, pool.counter_bytes if pool else 0)

"""Shared by tests: problems and records of linear layers, and what a GPU that is not there can launch for them."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.serve_library import HostFunction
from tritongemm.core.config import Config
from tritongemm.core.errors import DriverError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.record import Record
from tritongemm.core.served_call import LoadedKernel, PatchedLaunch
from tritongemm.core.support import Support
from tritongemm.formats import results_format
from tritongemm.plugins.contracts import Capabilities, LibraryBackend
from tritongemm.serving.device_kernels import DeviceKernels
from tritongemm.serving.dispatcher import Dispatcher
from tritongemm.serving.record_table import RecordTable
from tritongemm.serving.serving_device import ServingDevice
from tritongemm.serving.stored_kernels import TorchKernels
from tritongemm.system import settings

TILE = Config("tile", 16, 32, 32, split_k=2, num_warps=4, num_stages=2)
COMPUTE_UNITS = 132  # of the device that stands in


def problem(m: int, n: int, k: int, bias: str = "none", dtype: str = "bf16") -> Problem:
    return Problem(m, n, k, *matrices(dtype, layout="TN"), bias=bias)


def record(of: Problem, config: Config = TILE, **changes: Any) -> Record:
    toolchain = {"triton": settings.version("triton")}
    made = Record(of, "sm90", config, "triton", 2e-6, 0.01, "events", toolchain=toolchain, library="torch")
    return replace(made, library_seconds=3e-6, **changes)


def name_table(folder: Path, monkeypatch: pytest.MonkeyPatch, *records: Record) -> Path:
    """Write a table of records, and have the environment name it."""
    file = folder / "tuned.yaml"
    file.write_text(results_format().write(records), encoding="utf-8")
    monkeypatch.setenv("TRITONGEMM_CONFIG", str(file))
    return file


class StandInKernel:
    """Stands in for a loaded kernel that is never launched."""

    def bytes(self, buffer: str) -> int:
        return 0

    def prepare(self, device: Any) -> PatchedLaunch:
        return PatchedLaunch({}, lambda stream: None)


class HostKernel(StandInKernel):
    """A kernel that keeps the addresses of its launches, and writes a result."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.launched = result.contiguous(), list[dict[str, int]]()

    def prepare(self, device: Any) -> PatchedLaunch:
        at: dict[str, int] = {}

        def launch(_: int) -> None:
            self.launched.append(dict(at))
            ctypes.memmove(at["c"], self.result.data_ptr(), self.result.nbytes)

        names = ("a", "b", "c", "bias", "scale_a", "scale_b", "offsets", "counts")
        return PatchedLaunch({name: partial(at.__setitem__, name) for name in names}, launch)


class ComputingKernel(StandInKernel):
    """A kernel of float32 a [M, K] @ b [N, K].T + bias, in the host's memory; `added` makes it a wrong one."""

    def __init__(self, of: Problem, added: float = 0.0) -> None:
        self.problem, self.added, self.launches = of, added, 0

    def prepare(self, device: Any) -> PatchedLaunch:
        m, n, k = self.problem.m, self.problem.n, self.problem.k
        at = dict.fromkeys(("a", "b", "c", "bias"), 0)

        def matrix(name: str, rows: int, columns: int) -> Any:
            memory = (ctypes.c_float * (rows * columns)).from_address(at[name])
            return np.ctypeslib.as_array(memory).reshape(rows, columns)

        def launch(stream: int) -> None:
            bias = matrix("bias", 1, n) if at["bias"] else 0
            matrix("c", m, n)[:] = matrix("a", m, k) @ matrix("b", n, k).T + bias + self.added
            self.launches += 1

        return PatchedLaunch({name: partial(at.__setitem__, name) for name in at}, launch)


class StandInLibrary(LibraryBackend):
    """Stands in for a library with one algorithm, which it has for problems of 4 rows and more."""

    summary = "one algorithm"
    capabilities = Capabilities()
    name = "library"

    def _list_algorithms(self, *_: Any) -> list[Config]:
        return []

    def operation(self, *_: Any) -> None:
        return None

    def load(self, record: Record, device_index: int, device: Any) -> LoadedKernel | Support:
        return StandInKernel() if record.problem.m > 3 else Support("not for 3 rows")


class StandInTorchKernels(TorchKernels):
    """PyTorch's kernels, all of which are one."""

    def __init__(self, kernel: LoadedKernel | None) -> None:
        self.kernel = kernel

    def find(self, problem: Problem, precision: str) -> LoadedKernel | None:
        return self.kernel


class StandInDriver:
    """Stands in for the driver's device: memory that only has addresses."""

    api: Any = SimpleNamespace(symbol=lambda role: "")
    arch = "sm90"

    name = "NVIDIA H200"

    def __init__(self) -> None:
        self.next_address, self.allocated, self.full = 1 << 32, list[int](), False

    def make_current(self) -> None:
        """There is one device."""

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(handle=1, synchronize=lambda: None, destroy=lambda: None)

    def memset(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """The memory is not read."""

    def relaxed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def alloc(self, nbytes: int) -> int:
        if self.full:
            raise DriverError("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.allocated.append(nbytes)
        self.next_address += nbytes
        return self.next_address - nbytes


class HostDriver(StandInDriver):
    """One whose functions compute in the host's memory; keeps the code and the names that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[bytes, str]] = []

    def load(self, code: bytes) -> SimpleNamespace:
        def function(symbol: str) -> HostFunction:
            self.loaded.append((code, symbol))
            return HostFunction()

        return SimpleNamespace(function=function)


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fast calls see one default stream that captures nothing, also where there is a GPU."""
    for name, value in {"_stream": lambda index: 0, "_capturing": lambda: False, "_current": lambda: -1}.items():
        monkeypatch.setattr(f"tritongemm.serving.launching.{name}", value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def be_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """Have tensors on the CPU say that they are on a GPU; the process's dispatcher, which knows no records yet."""
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    dispatcher = Dispatcher()
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    return dispatcher


def stand_in_device(
    compute_units: int = COMPUTE_UNITS, driver_device: Any = None, memory_gbps: int = 0
) -> ServingDevice:
    """A device on the CPU, which says that it is an sm90."""
    driver: Any = driver_device or StandInDriver()
    return ServingDevice(-1, torch.device("cpu"), driver, "sm90", compute_units, memory_gbps)


def stand_in_kernels(
    records: RecordTable,
    loaded: dict[Problem, LoadedKernel | Support] | None = None,
    torch_kernel: LoadedKernel | None = None,
    tf32: tuple[Problem, ...] = (),
    compute_units: int = COMPUTE_UNITS,
) -> DeviceKernels:
    """What a device can launch: kernels of problems, one for all that are PyTorch's."""
    device, torch_kernels = stand_in_device(compute_units), StandInTorchKernels(torch_kernel)
    return DeviceKernels(device, records, torch_kernels, loaded or {}, tf32=frozenset(tf32))


def attach_device(dispatcher: Dispatcher, *given: Any, **named: Any) -> DeviceKernels:
    """Have a dispatcher believe that GPU 0 can launch these; see `stand_in_kernels`."""
    kernels = stand_in_kernels(dispatcher._records, *given, **named)
    dispatcher._devices[0], dispatcher._records_read = kernels, True
    return kernels

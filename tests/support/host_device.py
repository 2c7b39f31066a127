"""Stands in for a GPU's driver: kernels compute with numpy on the operands' own memory and take the time they say."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.support.nouns import Buffer, DriverError, Launch, Param, Patch, Problem
from tritongemm.hip_ext.driver import driver

LIBRARY_SECONDS = 4e-6
# microseconds of a launch, by what the kernel does
KERNELS: dict[str, float] = {"right": 3, "slow": 50, "wrong": 1, "lazy": 1, "refused": 1, "faster": 2}
KERNELS |= {"beyond": 1, "uneven": 1, "tires": float("nan"), "balks": float("inf")}
FAULTS = {"faults": "CUDA_ERROR_ILLEGAL_ADDRESS", "strays": "CUDA_ERROR_INVALID_ADDRESS_SPACE"}


class OnHost(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def gpu_on_host(patch: Patch) -> Iterator[Device]:
    """A stand-in for the device, in place of every way to a GPU in this process."""
    made = Device()
    patch.setattr(driver, "open_driver", lambda vendor: SimpleNamespace(device=lambda index: made))
    generator = torch.Generator
    patch.setattr(torch, "Generator", lambda device: generator())
    stream = SimpleNamespace(cuda_stream=7, synchronize=made.synchronize)
    for name, value in {
        "set_device": lambda index: None,
        "Stream": lambda index: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": made.synchronize,
        "empty_cache": lambda: None,
    }.items():
        patch.setattr(torch.cuda, name, value)
    with OnHost():
        yield made


def host_launch(folder: Path, kind: str, problem: Problem) -> Launch:
    """The launch of a kernel of some kind (`KERNELS`, `FAULTS`), its code a file in a folder."""
    (folder / kind).write_text(kind)
    params = [Param("pointer", name) for name in "abc"] + [Param("i32", v) for v in (problem.m, problem.n, problem.k)]
    return Launch(str(folder / kind), "k", (1, 1, 1), (32, 1, 1), 0, tuple(params), (Buffer("workspace", 64),))


class Device:
    """Stands in for `driver.Device`; counts what it gives out and gets back."""

    def __init__(self) -> None:
        self.now, self.fault = 0.0, False
        self.recording: list[float] | None = None
        self.modules = self.graphs = self.index = 0
        self.guarded_ends: set[int] = set()

    def guarded_memory(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.guarded_ends.add(memory.data_ptr() + nbytes)
        return memory

    def memory(self) -> tuple[int, int]:
        return 1 << 33, 1 << 34

    def synchronize(self) -> None:
        if self.fault:
            raise DriverError("synchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "")

    def event(self) -> Event:
        return Event(self)

    def load(self, code: bytes) -> Module:
        self.modules += 1
        return Module(self, code.decode())

    def begin_capture(self, stream: int) -> None:
        self.recording = []

    def end_capture(self, stream: int) -> Graph:
        taken, self.recording = self.recording, None
        self.graphs += 1
        return Graph(self, taken)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: int) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.synchronize()

    def elapsed_ms(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


class Graph:
    def __init__(self, device: Device, seconds: list[float] | None) -> None:
        self.device, self.seconds = device, sum(seconds or [])

    def launch(self, stream: int) -> None:
        if self.seconds == float("inf"):
            raise DriverError("graph_launch", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        if self.seconds != self.seconds:
            self.device.fault = True
            raise DriverError("graph_launch", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access")
        self.device.now += self.seconds or 32 * LIBRARY_SECONDS  # PyTorch's own launches are not recorded

    def destroy(self) -> None:
        self.device.graphs -= 1


class Module:
    def __init__(self, device: Device, kind: str) -> None:
        self.device, self.kind = device, kind

    def function(self, symbol: str) -> Module:
        return self

    def prepare(
        self, grid: Any, block: Any, shared: int, params: bytes, cluster: int, offsets: Any, overlap: bool
    ) -> Any:
        if self.kind == "refused":
            raise DriverError("prepare", 1, "CUDA_ERROR_INVALID_VALUE", "too much shared memory")
        return SimpleNamespace(launch=lambda stream: self.run(params))

    def run(self, params: bytes) -> None:
        device = self.device
        if device.recording is not None:
            device.recording.append(KERNELS[self.kind] * 1e-6)
            return
        if self.kind in FAULTS:
            device.fault = True
            raise DriverError("launch", 700, FAULTS[self.kind], "an illegal memory access")
        a, b, c, m, n, k = struct.unpack("<3Q3i", params)
        if self.kind == "beyond" and a + 4 * m * k in device.guarded_ends:
            device.fault = True
            raise DriverError("launch", 700, FAULTS["faults"], "an illegal memory access")
        if self.kind != "lazy":  # which writes nothing
            there = [np.ctypeslib.as_array((ctypes.c_float * s).from_address(p)) for p, s in ((a, m * k), (b, k * n))]
            out = np.ctypeslib.as_array((ctypes.c_float * (m * n)).from_address(c))
            with np.errstate(over="ignore"):  # rows of huge numbers
                rows = [row @ there[1].reshape(k, n) for row in there[0].reshape(m, k)]  # each by itself
            out[:] = np.concatenate(rows) * (2 if self.kind == "wrong" else 1)
            if self.kind == "uneven":  # the last row is rounded otherwise
                out[-n:] *= 1 + 2.0**-20

    def unload(self) -> None:
        self.device.modules -= 1

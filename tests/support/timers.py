import atexit
import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from tests.support import FAKES
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver, symbols
from tritongemm.hip_ext.profilers import cupti as cupti_binding
from tritongemm.hip_ext.profilers import rocprofiler as sdk_binding
from tritongemm.hip_ext.profilers.trace import KernelTrace, KernelTracer
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Clock, Timer

STREAM = 7  # the handle that a stand-in's graph is launched on
TRITON_BACKENDS = Path(triton.__file__).parent / "backends"
PROFILERS = {  # the timer that reads each stand-in, its source and its compiler's options
    "cupti": ("cupti", "cupti.c", f"-I{TRITON_BACKENDS}/nvidia/include"),
    "sdk0": ("rocprofiler", "rocprofiler.c", f"-I{TRITON_BACKENDS}/amd/include", "-DVERSION_0"),
    "sdk1": ("rocprofiler", "rocprofiler.c", f"-I{TRITON_BACKENDS}/amd/include"),
}


class Playback:
    """What a stand-in's GPU does: kernels by name, launched one after the other in device time."""

    def __init__(self, library: ctypes.CDLL, kind: str) -> None:
        self.library, self.kind, self.now, self.count = library, kind, 2000, 0
        self.known: dict[str, Any] = {}

    def launch(self, name: str, ns: int, gap: int = 50) -> None:
        start, self.now, self.count = self.now + gap, self.now + gap + ns, self.count + 1
        self.record(name, self.count, start, self.now)

    def record(self, name: str, order: int, start: int, end: int) -> None:
        if self.kind == "cupti":
            kept = self.known.setdefault(name, ctypes.create_string_buffer(name.encode()))  # CUPTI keeps names alive
            self.library.fake_launch(kept, start, end, order)
            return
        if name not in self.known:
            self.known[name] = len(self.known) + 1
            self.library.fake_load(f"{name}.kd".encode(), self.known[name], 2, 1)
        self.library.fake_launch(self.known[name], order, start, end)


def poke(library: ctypes.CDLL, name: str, value: int) -> None:
    ctypes.c_int.in_dll(library, f"fake_{name}").value = value


def traced(tracer: KernelTracer) -> KernelTrace:
    """A trace of what is launched inside it; nothing is waited for."""
    return KernelTrace(tracer, lambda: None)


class PlayedGraph:
    """A graph of launches: (name, ns, gap) each."""

    def __init__(self, gpu: Playback, nodes: list[tuple[str, int, int]]) -> None:
        self.gpu, self.nodes, self.replays = gpu, nodes, 0

    def launch(self, stream: int) -> None:
        assert stream == STREAM
        self.replays += 1
        for node in self.nodes:
            self.gpu.launch(*node)


@dataclass(frozen=True)
class Profiled:
    clock: Clock
    gpu: Playback
    library: ctypes.CDLL


def compilers() -> dict[str, list[str]]:
    """The compiler's command for each stand-in whose headers this Triton brings."""
    there = (TRITON_BACKENDS / "amd/include/rocprofiler-sdk").is_dir()
    return {
        name: ["cc", "-w", "-shared", "-fPIC", *options, str(FAKES / source), "-lpthread"]
        for name, (_, source, *options) in PROFILERS.items()
        if name == "cupti" or there
    }


def stand_in(kind: str, compiled: Path, folder: Path) -> ctypes.CDLL:
    """The library of a stand-in, whose state starts anew; skips the test where there is none."""
    if not (compiled / kind).exists():
        pytest.skip("this triton wheel has no SDK headers")
    library = ctypes.CDLL(str(shutil.copy(compiled / kind, folder / "fake.so")))
    if kind != "cupti":
        poke(library, "major", int(kind[-1]))
    return library


@contextmanager
def profiled(kind: str, compiled: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Profiled]:
    """The clock of a profiler on its stand-in; skips the test where there is none."""
    library = stand_in(kind, compiled, folder)
    patch.setattr(libraries, "load", lambda *_: library)
    handle: Any = cupti_binding.open_tracer if kind == "cupti" else sdk_binding.configure
    if kind == "cupti":
        patch.setattr(driver, "open_driver", lambda vendor: SimpleNamespace(api=SimpleNamespace(keeps_code=False)))
    else:
        patch.setattr(symbols, "bind", lambda vendor: None)
        patch.setattr(libraries, "mapped", lambda stem: Path("/lib") / stem)
        patch.setattr(atexit, "register", lambda function: None)
    handle.cache_clear()
    try:
        timer: Timer = registry.get(Timer, PROFILERS[kind][0])
        timer.prepare()
        yield Profiled(timer.clock(SimpleNamespace(synchronize=lambda: None), STREAM), Playback(library, kind), library)
    finally:
        handle.cache_clear()

"""The profilers' clocks against the stand-ins of their libraries, and how a run comes to its clock."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from tests.support import FAKES
from tritongemm.cli import tune
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.hip_ext import libraries
from tritongemm.hip_ext.driver import driver, symbols
from tritongemm.hip_ext.profilers import cupti as cupti_binding
from tritongemm.hip_ext.profilers import rocprofiler as sdk_binding
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError, busy_seconds
from tritongemm.measure import device_worker
from tritongemm.measure.jobs import Request
from tritongemm.measure.operand_sets import OperandSets, PreparedCandidate
from tritongemm.measure.timers import cupti, events, rocprofiler, rocprofv3
from tritongemm.plugins import _modules as registry
from tritongemm.runtime.machine import Machine
from tritongemm.search_spaces import loader as target_files

BACKENDS = Path(triton.__file__).parent / "backends"
STAND_INS = {
    "cupti": ("cupti.c", f"-I{BACKENDS}/nvidia/include"),
    "sdk0": ("rocprofiler.c", f"-I{BACKENDS}/amd/include", "-DVERSION_0"),
    "sdk1": ("rocprofiler.c", f"-I{BACKENDS}/amd/include"),
}
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Playback:
    """What the stand-in's GPU does: kernels by name, launched one after the other in device time."""

    def __init__(self, library: ctypes.CDLL, kind: str) -> None:
        self.library, self.kind, self.now, self.count, self.known = library, kind, 2000, 0, {}

    def launch(self, name: str, ns: int, gap: int = 50) -> None:
        start, self.now, self.count = self.now + gap, self.now + gap + ns, self.count + 1
        if self.kind == "cupti":
            kept = self.known.setdefault(name, ctypes.create_string_buffer(name.encode()))  # CUPTI keeps names alive
            self.library.fake_launch(kept, start, self.now, self.count)
            return
        if name not in self.known:
            self.known[name] = len(self.known) + 1
            self.library.fake_load(f"{name}.kd".encode(), self.known[name], 2, 1)
        self.library.fake_launch(self.known[name], self.count, start, self.now)


class Graph:
    """A graph of launches: (name, ns, gap) each."""

    def __init__(self, gpu: Playback, nodes: list[tuple[str, int, int]]) -> None:
        self.gpu, self.nodes, self.replays = gpu, nodes, 0

    def launch(self, stream: int) -> None:
        assert stream == 7
        self.replays += 1
        for node in self.nodes:
            self.gpu.launch(*node)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fakes")
    for name, (source, *options) in STAND_INS.items():
        if name != "cupti" and not (BACKENDS / "amd/include/rocprofiler-sdk").is_dir():
            continue  # this triton wheel has no SDK headers
        path = str(FAKES / source)
        command = ["cc", "-w", "-shared", "-fPIC", *options, path, "-o", str(folder / name), "-lpthread"]
        subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(params=STAND_INS)
def clock(request, built, tmp_path, monkeypatch):
    """(timer, GPU, library) of one of the stand-ins, the timer made as the GPU's process makes it."""
    if not (built / request.param).exists():
        pytest.skip("this triton wheel has no SDK headers")
    library = ctypes.CDLL(str(shutil.copy(built / request.param, tmp_path / "fake.so")))
    monkeypatch.setattr(libraries, "load", lambda *_: library)
    if request.param == "cupti":
        module, binding, make = cupti, cupti_binding, "open_tracer"
    else:
        ctypes.c_int.in_dll(library, "fake_major").value = int(request.param[-1])
        module, binding, make = rocprofiler, sdk_binding, "configure"
        monkeypatch.setattr(symbols, "bind", lambda vendor: None)
        monkeypatch.setattr(libraries, "mapped", lambda stem: Path("/lib") / stem)
        monkeypatch.setattr(sdk_binding.atexit, "register", lambda function: None)
    getattr(binding, make).cache_clear()
    module.prepare()
    timer = module.Timer(SimpleNamespace(synchronize=lambda: None), 7)
    yield timer, Playback(library, request.param), library
    getattr(binding, make).cache_clear()


@needs_cc
def test_a_launch_takes_as_long_as_its_kernel(clock):
    timer, gpu, _ = clock
    graph = Graph(gpu, [("gemm", 100 + 10 * i, 50) for i in range(4)])
    assert timer.time(graph, 4, "gemm") == pytest.approx(115e-9), "gaps are not in it"
    assert graph.replays == 2
    gpu.launch("another", 5000)  # what runs between two measurements is in neither
    graph.nodes[0] = ("gemm", 500, 50)
    assert timer.time(graph, 4, "gemm") == pytest.approx(215e-9)
    assert graph.replays == 4, "each time is led in"


@needs_cc
def test_a_librarys_operation_may_be_several_kernels(clock):
    timer, gpu, _ = clock
    graph = Graph(gpu, [("split", 300, 50), ("reduce", 100, 50)] * 3)
    assert timer.time(graph, 3) == timer.time(graph, 3) == pytest.approx(400e-9)
    graph.nodes[-1] = ("other", 100, 50)
    with pytest.raises(TraceError, match="launch 5 was reduce, its record says other"):
        timer.time(graph, 3)


@needs_cc
def test_launches_that_overlap_count_what_they_share_once(clock):
    timer, gpu, _ = clock
    graph = Graph(gpu, [("gemm", 200, -50)] * 4)
    assert timer.time(graph, 4, "gemm") == pytest.approx((200 + 3 * 150) / 4 * 1e-9)


@needs_cc
@pytest.mark.parametrize(
    ("nodes", "symbol", "message"),
    [
        ([("gemm", 100, 50)] * 3, "gemm", "8 launches, but 6 records"),
        ([("gemm", 100, 50)] * 5, "gemm", "8 launches, but 10 records"),
        ([("gemm", 100, 50)] * 3 + [("stray", 100, 50)], "gemm", "launch 3 was gemm, its record says stray"),
        ([("gemm", 0, 50)] * 4, "", None),
        (
            [("split", 100, 50), ("reduce", 100, 50), ("split", 100, 50)],
            "",
            "4 launches gave 6 records, .* reduce, split",
        ),
        ([], "", "gave 0 records, .* none"),
    ],
)
def test_what_does_not_match_the_launches_is_never_a_time(clock, nodes, symbol, message, monkeypatch):
    timer, gpu, _ = clock
    monkeypatch.setattr(timer, "PATIENCE", 0.01)
    graph = Graph(gpu, nodes)
    if message is None:
        assert timer.time(graph, 4, symbol) == 0.0
        return
    with pytest.raises(TraceError, match=message + r".*--profiler events"):
        timer.time(graph, 4, symbol)
    assert graph.replays == 2 * timer.ATTEMPTS, "taken anew, and then given up"


@needs_cc
def test_a_spoiled_trace_is_taken_anew(clock):
    timer, gpu, library = clock
    dropped = ctypes.c_int.in_dll(library, "fake_dropped")
    graph, launch = Graph(gpu, [("gemm", 100, 50)] * 4), Graph.launch

    def flaky(stream: int) -> None:
        dropped.value = 1  # CUPTI tells what it dropped since it was asked, the SDK what it ever dropped
        launch(graph, stream)
        if graph.replays > 2 and gpu.kind == "cupti":
            dropped.value = 0

    graph.launch = flaky
    assert timer.time(graph, 4, "gemm") == pytest.approx(100e-9)
    assert graph.replays == 4


def test_busy_time_is_the_union():
    spans = [(10, 30), (20, 25), (28, 40), (50, 60), (60, 65)]
    assert busy_seconds(KernelRecord("", *s) for s in reversed(spans)) == pytest.approx(45e-9)
    assert busy_seconds([]) == 0


def test_the_process_registers_before_it_opens_the_gpu(monkeypatch):
    """Bench asks the timer to prepare before PyTorch or the driver touches a device."""
    calls = []
    timer = SimpleNamespace(prepare=lambda: (_ for _ in ()).throw(UnavailableError("too late")))
    monkeypatch.setattr(registry, "load", lambda kind, name: calls.append((kind, name)) or timer)
    one = device_worker.DeviceWorker()
    monkeypatch.setattr(one._torch.cuda, "set_device", lambda device: pytest.fail("the device came first"))
    request = Request(
        "screen", Problem(1, 1, 1), target_files.load_target("gfx942"), MeasureProtocol("rocprofiler"), "amd", 0, ()
    )
    with pytest.raises(UnavailableError, match="too late"):
        next(one(request))
    assert calls == [("timers", "rocprofiler")]


@pytest.mark.parametrize(("name", "screened"), [("cupti", "graph-events"), ("events", "graph-events")])
def test_the_screen_has_the_clock_that_the_races_names(name, screened, monkeypatch):
    made = []
    for module in (cupti, events):
        monkeypatch.setattr(module, "Timer", lambda device, stream, label=module.LABEL: made.append(label) or label)
    one = OperandSets.__new__(OperandSets)
    one.protocol, one.device, one.stream = MeasureProtocol(name), None, 7
    assert one.screener == (screened, screened) and one.timer == registry.load("timers", name).LABEL
    assert made == list(dict.fromkeys([screened, one.timer])), "each is made once"


def test_code_stays_while_the_clock_needs_it():
    unloaded = []
    calls = PreparedCandidate([], SimpleNamespace(unload=lambda: unloaded.append(1)), "gemm")
    for name, count in (("cupti", 0), ("events", 1)):
        OperandSets.release(SimpleNamespace(protocol=MeasureProtocol(name)), calls)
        assert len(unloaded) == count
    assert events.LABEL != cupti.LABEL != rocprofiler.LABEL != rocprofv3.LABEL


@pytest.mark.parametrize("name", ["cupti", "rocprofiler", "rocprofv3"])
def test_without_the_vendor_a_profiler_says_why(name, monkeypatch):
    monkeypatch.setattr(driver, "open_driver", lambda vendor: (_ for _ in ()).throw(UnavailableError(f"no {vendor} driver")))
    monkeypatch.setattr(rocprofv3, "folders", lambda: [Path("/nowhere/bin")])
    monkeypatch.setenv("PATH", "/none")
    reason = registry.unavailable("timers", name)
    assert reason and ("no nvidia driver" in reason or "no amd driver" in reason or "/nowhere/bin" in reason)


def test_the_sdk_is_asked_in_a_process_of_its_own(monkeypatch):
    present = driver.find_vendor()
    monkeypatch.setattr(driver, "open_driver", lambda vendor: None)
    if present != "amd":
        assert "HIP runtime" in (rocprofiler.unavailable() or "")


def test_the_clock_of_a_run(monkeypatch, capsys):
    here = Machine(target_files.load_target("gfx942"), "amd", (0,), "MI300X", "tuning on MI300X")
    reasons = {"rocprofiler": None, "cupti": "no NVIDIA", "rocprofv3": "not found", "events": None}
    monkeypatch.setattr(tune.registry, "unavailable", lambda kind, name: reasons[name])
    assert tune._timer(None, here) == "events"
    assert tune._timer("auto", here) == "rocprofiler"
    assert tune._timer("events", here) == "events"
    with pytest.raises(InputError, match="--profiler rocprofv3: not found; --profiler events needs"):
        tune._timer("rocprofv3", here)
    reasons["rocprofiler"] = "locked"
    assert tune._timer("auto", here) == "events"
    monkeypatch.undo()
    if driver.find_vendor() is None:
        size = ["-m", "1", "-n", "2", "-k", "3"]
        for name, why in (("cupti", "looked for libcuda.so.1"), ("rocprofv3", "/opt/rocm/bin")):
            assert tune.main([*size, "--profiler", name]) == 2
            said = capsys.readouterr().err
            assert f"--profiler {name}: nothing runs here" in said and why in said

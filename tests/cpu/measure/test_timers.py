import ctypes
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import raising
from tests.support.nouns import SUPPORTED, Capsys, Machine, MeasureProtocol, Patch, Problem, Support, each, registry
from tests.support.refusals import fails, refuses
from tests.support.tables import apart
from tests.support.timers import PROFILERS, PlayedGraph, Profiled, profiled
from tritongemm.cli import tune
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.trial import PREDICTED
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.profilers.trace import KernelRecord, TraceError, busy_seconds
from tritongemm.measure import device_worker
from tritongemm.measure.jobs import MeasureSetup, VerifyJob
from tritongemm.measure.operand_sets import OperandSets
from tritongemm.measure.timers import rocprofv3
from tritongemm.measure.timers._traced import TracedClock
from tritongemm.plugins.contracts import Timer
from tritongemm.search_spaces import loader as target_files
from tritongemm.tune import session

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(params=PROFILERS)
def clock(request: pytest.FixtureRequest, profilers: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[Profiled]:
    with profiled(request.param, profilers, tmp_path, monkeypatch) as found:
        yield found


@needs_cc
def test_a_launch_takes_as_long_as_its_kernels_and_what_overlaps_counts_once(clock: Profiled) -> None:
    timer, gpu = clock.clock, clock.gpu
    graph = PlayedGraph(gpu, [("gemm", 100 + 10 * i, 50) for i in range(4)])
    assert timer.time(graph, 4, "gemm") == pytest.approx(115e-9), "gaps are not in it"
    assert graph.replays == 2
    gpu.launch("another", 5000)  # what runs between two measurements is in neither
    graph.nodes[0] = ("gemm", 500, 50)
    assert timer.time(graph, 4, "gemm") == pytest.approx(215e-9)
    assert graph.replays == 4, "each time is led in"
    graph = PlayedGraph(gpu, [("split", 300, 50), ("reduce", 100, 50)] * 3)
    assert timer.time(graph, 3) == timer.time(graph, 3) == pytest.approx(400e-9)
    graph.nodes[-1] = ("other", 100, 50)
    fails(TraceError, "launch 5 was reduce, its record says other", timer.time, graph, 3)
    graph = PlayedGraph(gpu, [("gemm", 200, -50)] * 4)
    assert timer.time(graph, 4, "gemm") == pytest.approx((200 + 3 * 150) / 4 * 1e-9)


@needs_cc
@apart(
    ([("gemm", 100, 50)] * 3, "gemm", "8 launches, but 6 records"),
    ([("gemm", 100, 50)] * 5, "gemm", "8 launches, but 10 records"),
    ([("gemm", 100, 50)] * 3 + [("stray", 100, 50)], "gemm", "launch 3 was gemm, its record says stray"),
    ([("gemm", 0, 50)] * 4, "", None),
    ([("split", 100, 50), ("reduce", 100, 50), ("split", 100, 50)], "", "4 launches gave 6 records, .* reduce, split"),
    ([], "", "gave 0 records, .* none"),
)
def test_what_does_not_match_the_launches_is_never_a_time(
    nodes: list[tuple[str, int, int]], symbol: str, message: str | None, /, clock: Profiled, monkeypatch: Patch
) -> None:
    timer, gpu = clock.clock, clock.gpu
    monkeypatch.setattr(timer, "RECORDS_TIMEOUT_SECONDS", 0.01)
    graph = PlayedGraph(gpu, nodes)
    if message is None:
        assert timer.time(graph, 4, symbol) == 0.0
        return
    fails(TraceError, message + r".*--profiler events", timer.time, graph, 4, symbol)
    assert graph.replays == 2 * TracedClock.ATTEMPTS, "taken anew, and then given up"


@needs_cc
def test_a_spoiled_trace_is_taken_anew(clock: Profiled) -> None:
    timer, gpu, library = clock.clock, clock.gpu, clock.library
    dropped = ctypes.c_int.in_dll(library, "fake_dropped")
    graph, launch = PlayedGraph(gpu, [("gemm", 100, 50)] * 4), PlayedGraph.launch

    def flaky(stream: int) -> None:
        dropped.value = 1  # CUPTI says what it dropped since it was asked, the SDK what it ever dropped
        launch(graph, stream)
        if graph.replays > 2 and gpu.kind == "cupti":
            dropped.value = 0

    graph.launch = flaky  # type: ignore[method-assign]
    assert timer.time(graph, 4, "gemm") == pytest.approx(100e-9) and graph.replays == 4


def test_busy_time_is_the_union_and_external_timers_leave_out_what_they_can_not_race() -> None:
    spans = [(10, 30), (20, 25), (28, 40), (50, 60), (60, 65)]
    assert busy_seconds(KernelRecord("", *s) for s in reversed(spans)) == pytest.approx(45e-9)
    assert busy_seconds([]) == 0
    backends = ("asm", "blaslt", "triton")
    assert session._racing_under("rocprofv3", backends) == ("triton",)
    assert session._racing_under("events", backends) == session._racing_under(PREDICTED, backends) == backends
    with pytest.raises(InputError, match=r"--profiler rocprofv3: no backend of this run can race: .* kernels of asm"):
        session._racing_under("rocprofv3", ("asm",))


def test_the_process_registers_before_it_opens_the_gpu(monkeypatch: Patch) -> None:
    """The timer is prepared before PyTorch or the driver touches a device."""
    monkeypatch.setattr(registry.get(Timer, "rocprofiler"), "prepare", raising(UnavailableError("too late")))
    worker = device_worker.DeviceWorker()
    monkeypatch.setattr(worker._torch.cuda, "set_device", lambda device: pytest.fail("the device came first"))
    setup = MeasureSetup(Problem(1, 1, 1), target_files.load_target("gfx942"), MeasureProtocol("rocprofiler"), "amd", 0)
    fails(UnavailableError, "too late", next, worker(VerifyJob(setup, ())))


def operands_with(timer: str) -> OperandSets:
    """Operands of nothing, of which only the timer's name matters."""
    one = OperandSets.__new__(OperandSets)
    device: Any = SimpleNamespace()
    one.protocol, one.device, one.stream = MeasureProtocol(timer), device, 7
    return one


@each(("name", "screened"), [("cupti", "graph-events"), ("events", "graph-events")])
def test_the_screen_has_the_clock_that_the_races_names(name: str, screened: str, monkeypatch: Patch) -> None:
    made: list[str] = []

    def make(label: str, device: object, stream: int) -> str:
        made.append(label)
        return label

    for name in ("cupti", "events"):
        timer = registry.get(Timer, name)
        monkeypatch.setattr(timer, "clock", partial(make, timer.label))
    one: Any = operands_with(name)
    race_label = registry.get(Timer, name).label
    assert one.screen_clock == (screened, screened) and one.race_clock == race_label
    assert made == list(dict.fromkeys([screened, race_label])), "each is made once"


@each("name", ["cupti", "rocprofiler", "rocprofv3"])
def test_without_the_vendor_a_profiler_says_why(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        driver, "open_driver", lambda vendor: (_ for _ in ()).throw(UnavailableError(f"no {vendor} driver"))
    )
    monkeypatch.setattr(rocprofv3, "folders", lambda: [Path("/nowhere/bin")])
    monkeypatch.setenv("PATH", "/none")
    support = registry.available(Timer, name)
    reason = support.reason
    assert not support and ("no nvidia driver" in reason or "no amd driver" in reason or "/nowhere/bin" in reason)


def test_the_sdk_is_asked_in_a_process_of_its_own(monkeypatch: Patch) -> None:
    present = driver.find_vendor()
    monkeypatch.setattr(driver, "open_driver", lambda vendor: None)
    if present != "amd":
        assert "HIP runtime" in registry.available(Timer, "rocprofiler").reason


def test_the_clock_of_a_run(monkeypatch: Patch, capsys: Capsys) -> None:
    here = Machine(target_files.load_target("gfx942"), "amd", (0,), "MI300X", "tuning on MI300X")
    supports = {"rocprofiler": SUPPORTED, "cupti": SUPPORTED, "rocprofv3": Support("not found"), "events": SUPPORTED}
    for name in supports:
        monkeypatch.setattr(registry.get(Timer, name), "available", lambda name=name: supports[name])
    assert session.pick_timer(None, here) == "events"
    assert session.pick_timer("auto", here) == "rocprofiler", "the vendor's own, in process"
    assert session.pick_timer("events", here) == "events"
    refuses("--profiler rocprofv3: not found; --profiler events needs", session.pick_timer, "rocprofv3", here)
    supports["rocprofiler"], supports["rocprofv3"] = Support("locked"), SUPPORTED
    assert session.pick_timer("auto", here) == "events", "one in a process of its own is asked for by its name"
    monkeypatch.undo()
    if driver.find_vendor() is None:
        size = ["-m", "1", "-n", "2", "-k", "3"]
        for name, why in (("cupti", "looked for libcuda.so.1"), ("rocprofv3", "/opt/rocm/bin")):
            assert tune.main([*size, "--profiler", name]) == 2
            said = capsys.readouterr().err
            assert f"--profiler {name}: nothing runs here" in said and why in said

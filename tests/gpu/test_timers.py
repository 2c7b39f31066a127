import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.cuda import Stream

from tests.gpu.here import nvidia, triton
from tests.support.nouns import BASELINE_ENTRY, Artifact, BuildPool, Launch, Machine, MeasureProtocol, fails, registry
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.driver import driver
from tritongemm.hip_ext.profilers import cupti
from tritongemm.hip_ext.profilers import cupti as cupti_binding
from tritongemm.hip_ext.profilers.trace import TraceError
from tritongemm.measure.jobs import LaunchCandidate, MeasureSetup
from tritongemm.measure.operand_sets import OperandSets, PreparedCandidate
from tritongemm.measure.timers import rocprofv3
from tritongemm.plugins.contracts import Clock, Family, LibraryBackend, Timer
from tritongemm.search import planner

pytestmark = nvidia
SIZES = [(1, 4096, 4096), (64, 4096, 4096), (2048, 2048, 2048), (4096, 4096, 4096)]


@pytest.fixture(scope="module")
def stream() -> Iterator[Stream]:
    support = registry.available(Timer, "cupti")
    if not support:
        pytest.skip(support.reason)
    registry.get(Timer, "cupti").prepare()
    torch.zeros(1, device="cuda")
    one = Stream()
    with torch.cuda.stream(one):
        yield one


def operands_of(problem: Problem, machine: Machine, stream: Stream) -> OperandSets:
    device = driver.open_driver(machine.vendor).device(0)
    setup = MeasureSetup(problem, machine.target, MeasureProtocol(timer="cupti"), machine.vendor, 0)
    return OperandSets(setup, device, stream.cuda_stream)


def clock_of(timer: str, operands: OperandSets) -> Clock:
    clock: Clock = registry.get(Timer, timer).clock(operands.device, operands.stream)
    return clock


def built(problem: Problem, machine: Machine, compiler: BuildPool, folder: Path, count: int) -> list[Artifact]:
    favourites = planner.plan_search(problem, machine.target, folder, "triton").order[: 3 * count : 3]
    jobs = [triton().compile_job(p.config, problem, machine.target) for p in favourites]
    return [b for b in compiler.stream(jobs) if b.status == "ok"]


def both(operands: OperandSets, prepared: PreparedCandidate, launches: int) -> tuple[float, float]:
    """Median seconds of a launch by CUPTI, and by events on a graph that CUPTI never saw."""
    prepared.calls[0]()
    torch.cuda.synchronize()
    watched, plain = operands.capture(prepared.in_turn(launches)), operands.capture(prepared.in_turn(launches))
    profiler, clock = clock_of("cupti", operands), clock_of("events", operands)
    traced, evented = [], []
    for _ in range(6):  # in blocks, so that both see the same clocks, and events see a device without a profiler
        traced += [profiler.time(watched, launches, prepared.symbol) for _ in range(4)]
        cupti_binding.open_tracer().disable()
        for turn in range(6):
            plain.launch(operands.stream)  # the device is busy while the timed replay is queued
            seconds = clock.time(plain, launches)
            evented += [seconds] * (turn > 1)
    watched.destroy()
    plain.destroy()
    return median(traced), median(evented)


@pytest.mark.parametrize("size", SIZES)
def test_our_kernels_take_as_long_by_either_clock(
    size: tuple[int, int, int], gpu_machine: Machine, compiler: BuildPool, stream: Stream, tmp_path: Path
) -> None:
    problem = Problem(*size)
    operands = operands_of(problem, gpu_machine, stream)
    launches = operands.launches_for(4e-4, 256)
    (one, *_) = built(problem, gpu_machine, compiler, tmp_path, 8)
    launch = triton().launch(one, problem, gpu_machine.target)
    assert isinstance(launch, Launch)
    for overlap in sorted({False, launch.overlap}):  # consecutive launches that overlap count what they share once
        candidate = LaunchCandidate(one.config, replace(launch, overlap=overlap))
        ours, theirs = both(operands, operands.prepare(candidate, min(operands.copies, launches)), launches)
        how = "overlapping" if overlap else "in turn"
        print(f"  {size} {how}: CUPTI {ours * 1e6:8.3f} us, events {theirs * 1e6:8.3f} us, {launches} launches")
        assert ours > 5e-6 and abs(theirs - ours) < max(0.05 * ours, 0.5e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_library_differs_by_its_gaps_at_most(
    size: tuple[int, int, int], gpu_machine: Machine, stream: Stream
) -> None:
    """An operation of several nodes has several gaps, which a graph counts and CUPTI does not (0.4 to 0.55 us each)."""
    operands = operands_of(Problem(*size), gpu_machine, stream)
    launches = operands.launches_for(4e-4, 256)
    prepared = PreparedCandidate(operands.library_calls("torch", launches))
    ours, theirs = both(operands, prepared, launches)
    graph = operands.capture(prepared.in_turn(1))
    with cupti_binding.CuptiTrace() as trace:
        graph.launch(operands.stream)
    names = [r.name for r in trace.records()]
    graph.destroy()
    print(f"  {size}: CUPTI {ours * 1e6:8.3f} us, events {theirs * 1e6:8.3f} us, nodes {[n[:40] for n in names]}")
    assert names and abs(theirs - ours) < max(0.05 * ours, 0.5e-6 if len(names) == 1 else 0.75e-6 * len(names))


def test_a_librarys_graph_writes_to_its_own_memory_alone(gpu_machine: Machine, stream: Stream) -> None:
    plain = Problem(256, 2048, 2048, *matrices("bf16", "int4", "bf16", layout="TN"))
    operands = operands_of(registry.get(Family, "a16w4").problem(plain), gpu_machine, stream)
    prepared = PreparedCandidate(operands.library_calls("mixed_input", 1))  # which allocates its result
    made = prepared.calls[0]()
    assert isinstance(made, torch.Tensor) and made.shape == (256, 2048)
    torch.cuda.synchronize()
    graph = operands.capture(prepared.in_turn(4))
    later = [torch.zeros(256, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    graph.launch(operands.stream)
    torch.cuda.synchronize()
    graph.destroy()
    assert not any(bool(one.any()) for one in later)


def test_names_stay_right_over_many_kernels(
    gpu_machine: Machine, compiler: BuildPool, stream: Stream, tmp_path: Path
) -> None:
    """CUPTI mistakes a kernel for a new one with its handle: code stays loaded while CUPTI is the clock."""
    problem = Problem(64, 1024, 1024)
    operands = operands_of(problem, gpu_machine, stream)
    candidates = built(problem, gpu_machine, compiler, tmp_path, 30)
    assert len(candidates) > 20
    for one in candidates:
        candidate = LaunchCandidate(one.config, triton().launch(one, problem, gpu_machine.target))
        prepared = operands.prepare(candidate, 2)
        assert prepared.symbol == one.symbol
        prepared.calls[0]()
        graph = operands.capture(prepared.in_turn(4))
        assert 1e-6 < operands.race_clock.time(graph, 4, prepared.symbol) < 0.1  # beside other tests, too
        graph.destroy()
        prepared.unload()


def test_a_kernel_by_another_name_is_refused(gpu_machine: Machine, stream: Stream) -> None:
    problem = Problem(256, 256, 256)
    operands = operands_of(problem, gpu_machine, stream)
    operation = registry.get(LibraryBackend, "torch").operation(problem, operands.sets[0])
    assert operation is not None
    operation()
    torch.cuda.synchronize()
    graph = operands.capture([operation] * 4)
    fails(TraceError, "was another_kernel", operands.race_clock.time, graph, 4, "another_kernel")
    assert operands.race_clock.time(graph, 4) > 0
    graph.destroy()


def test_a_module_marks_its_launches(gpu_machine: Machine, compiler: BuildPool, stream: Stream, tmp_path: Path) -> None:
    """The generated module's --trace, as rocprofv3 watches it on AMD, watched by CUPTI."""
    import importlib.util

    problem = Problem(256, 512, 1024)
    configs = [b.config for b in built(problem, gpu_machine, compiler, tmp_path, 4)][:3]
    path = triton().write_candidates(problem, configs, gpu_machine.target, tmp_path)
    spec = importlib.util.spec_from_file_location("watched", path)
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = torch  # which it imports when run by itself
    a, b = (module.operand(*shape, torch.float16, True, "cuda") for shape in ((256, 1024), (1024, 512)))
    c, names = torch.empty(256, 512, dtype=torch.float16, device="cuda"), [one.name for one in configs]
    module.trace([*names, "library"], 1, 0, a, b, c, {})  # compiles
    with cupti_binding.CuptiTrace() as trace:
        module.trace([*names, "library"], 5, 16, a, b, c, {})
    found = rocprofv3.launch_seconds(trace.records(), [*names, BASELINE_ENTRY], 5)
    assert {len(seconds) for seconds in found.values()} == {5}
    assert all(1e-6 < s < 1e-3 for seconds in found.values() for s in seconds)


LAUNCHES = 20


@pytest.fixture(scope="module")
def device() -> driver.Device:
    found = driver.open_driver("nvidia").device()
    torch.zeros(1, device="cuda")
    return found


def test_names_and_order(device: driver.Device) -> None:
    x = torch.randn(1 << 20, device="cuda")
    with cupti.CuptiTrace() as trace:
        x.sin()
        torch.mm(x.view(1024, 1024), x.view(1024, 1024))
        x.cos()
    records = trace.records(3)
    assert "sin" in records[0].name and "cos" in records[2].name
    assert "gemm" in records[1].name.lower() or "cutlass" in records[1].name.lower() or "nvjet" in records[1].name
    assert [r.start_ns for r in records] == sorted(r.start_ns for r in records)
    assert all(1e-7 < r.seconds < 1e-2 for r in records)
    fails(TraceError, "4 launches, but 3 records", trace.records, 4, timeout=0.1)
    fails(TraceError, "launch 0 was other", trace.records, ["other", "", ""])


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel_{number}(.param .u64 address)
{{
    .reg .b64 %place<3>;
    .reg .b32 %value;
    ld.param.u64 %place1, [address];
    cvta.to.global.u64 %place2, %place1;
    mov.u32 %value, {number};
    st.global.u32 [%place2], %value;
    ret;
}}
\0"""


@pytest.mark.parametrize("watched_while_loading", [True, False])
def test_kernels_have_their_own_name_after_others_are_freed(device: driver.Device, watched_while_loading: bool) -> None:
    """CUPTI would name it after code that was new; seen with 38 of these 40."""
    tracer, out = cupti.open_tracer(), torch.zeros(1, dtype=torch.int32, device="cuda")
    params = struct.pack("<Q", out.data_ptr())
    for number in range(40):
        if not watched_while_loading:
            tracer.disable()
        module = device.load(PTX.format(number=number).encode())
        prepared = module.function(f"kernel_{number}").prepare((1, 1, 1), (32, 1, 1), 0, params)
        with cupti.CuptiTrace() as trace:
            prepared.launch(torch.cuda.current_stream().cuda_stream)
        assert [r.name for r in trace.records(1)] == [f"kernel_{number}"] and out.item() == number
        module.unload()


def test_nothing_is_carried_from_trace_to_trace(device: driver.Device) -> None:
    x = torch.randn(1 << 24, device="cuda")
    for count in (1, 5, 0, 3):
        for _ in range(50):
            x.sin_()  # still running when the trace begins
        with cupti.CuptiTrace() as trace:
            for _ in range(count):
                x.cos_()
        assert len(trace.records(count)) == count
        assert all("cos" in r.name for r in trace.records())


def test_more_kernels_than_a_buffer_holds(device: driver.Device) -> None:
    x = torch.zeros(16, device="cuda")
    with cupti.CuptiTrace() as trace:
        for _ in range(20_000):
            x.add_(1)
    records = trace.records(20_000)
    assert x[0].item() == 20_000
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(records))

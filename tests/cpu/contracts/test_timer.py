import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import host_device
from tests.support.nouns import Config, Patch, Problem, Support, load_target, refuses, registry
from tests.support.plugins import dropped, each_with_toy
from tests.support.timers import PROFILERS, STREAM, PlayedGraph, profiled
from tritongemm.core.trial import PREDICTED
from tritongemm.plugins.contracts import Clock, ExternalRaceJob, ExternalTimer, Timer

TOY = "timer_toy"
NAMES = [*registry.names(Timer), TOY]
LAUNCHES = 4


@dataclass(frozen=True)
class TimedGraphs:
    clock: Clock
    graph: Callable[[int], Any]


class SleepingGraph:
    """A graph that keeps the host busy as long as its kernels take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def launch(self, stream: int) -> None:
        assert stream == STREAM
        time.sleep(self.seconds)


timer = each_with_toy(Timer, TOY)


@pytest.fixture
def bench(timer: Timer, profilers: Path, tmp_path: Path, monkeypatch: Patch) -> Iterator[TimedGraphs]:
    stand_ins = [kind for kind, (name, *_) in PROFILERS.items() if name == timer.name]
    with ExitStack() as stack:
        if isinstance(timer, ExternalTimer):
            pytest.skip("it times no graphs")
        if stand_ins:
            found = stack.enter_context(profiled(stand_ins[-1], profilers, tmp_path, monkeypatch))
            yield TimedGraphs(found.clock, lambda ns: PlayedGraph(found.gpu, [("gemm", ns, 50)] * LAUNCHES))
        elif timer.name == TOY:
            device = SimpleNamespace(synchronize=lambda: None)
            yield TimedGraphs(timer.clock(device, STREAM), lambda ns: SleepingGraph(LAUNCHES * ns * 1e-9))
        else:
            host = host_device.Device()
            yield TimedGraphs(timer.clock(host, STREAM), lambda ns: host_device.Graph(host, [ns * 1e-9] * LAUNCHES))


def test_it_is_described_and_says_whether_it_can_be_used(timer: Timer) -> None:
    assert timer.label and timer.label != PREDICTED and timer.vendor in ("", "amd", "nvidia")
    assert timer.name in NAMES and timer.kind == "timer"
    support = timer.available()
    assert isinstance(support, Support) and bool(support) == (support.reason == "")


def test_labels_are_distinguished(tmp_path: Path, monkeypatch: Patch) -> None:
    with dropped(Timer, TOY, tmp_path, monkeypatch):
        labels = [t.label for t in registry.every(Timer)]
    assert len(labels) == len(set(labels)) == len(NAMES)


def test_what_screens_in_its_place_times_graphs(timer: Timer) -> None:
    """One that races elsewhere names one; the one named needs no other and is for the same GPUs."""
    if isinstance(timer, ExternalTimer):
        assert timer.screens_with, "it has no clock of its own"
    if timer.screens_with:
        other = registry.get(Timer, timer.screens_with)
        assert not isinstance(other, ExternalTimer) and not other.screens_with
        assert other.vendor in ("", timer.vendor)


def test_a_clock_gives_seconds_of_one_launch_of_a_library_too(bench: TimedGraphs) -> None:
    """Of one launch, not of the graph, and in seconds: at most a tenth more or less, or what the host takes to wake."""
    for ns in (40_000_000, 20_000_000):
        assert bench.clock.time(bench.graph(ns), LAUNCHES, "gemm") == pytest.approx(ns * 1e-9, rel=0.25)
    graph = bench.graph(20_000_000)
    for _ in range(2):
        assert bench.clock.time(graph, LAUNCHES) == pytest.approx(20e-3, rel=0.25)


def test_an_external_race_refuses_what_it_can_not_run(timer: Timer) -> None:
    if not isinstance(timer, ExternalTimer):
        assert not hasattr(timer, "race"), "only an ExternalTimer races"
        return
    refuses("in a process of its own", timer.clock, None, 0)
    support = timer.races("torch")
    assert not support and "torch" in support.reason
    target, problem = load_target("gfx942"), Problem(16, 16, 16)
    config = Config("default", 0, 0, 0, num_warps=0, num_stages=0, backend="torch")
    job = ExternalRaceJob(problem, target, (config,), "", 0, rotating_mb=1, warmup=1, iters=1, timeout_s=1.0)
    refuses("torch", timer.race, job)

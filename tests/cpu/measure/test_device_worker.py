"""The GPU's process on the host: what it answers to right, slow, wrong, refused and faulting kernels, and what it frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.host_device import FAULTS, Device, OnHost
from tritongemm.core.config import Config
from tritongemm.core.launch import Buffer, Launch, Param
from tritongemm.core.problem import Problem
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.trial import Trial
from tritongemm.measure import device_worker, operand_sets
from tritongemm.measure.device_worker import DeviceWorker
from tritongemm.measure.jobs import Request
from tritongemm.measure.operand_sets import OperandSets
from tritongemm.plugins import _modules as registry
from tritongemm.search_spaces import loader as target_files

SIZE = Problem(24, 40, 16, "fp32", "fp32", "fp32")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The stand-in, in place of every way to a GPU."""
    made = Device()
    monkeypatch.setattr(device_worker.driver, "open_driver", lambda vendor: SimpleNamespace(device=lambda index: made))
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    stream = SimpleNamespace(cuda_stream=7, synchronize=made.synchronize)
    for name, value in {
        "set_device": lambda index: None,
        "Stream": lambda index: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": made.synchronize,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with OnHost():
        yield made


def candidates(folder: Path, *kinds: str) -> tuple[tuple[Config, Launch], ...]:
    found = []
    for number, kind in enumerate(kinds):
        (folder / kind).write_text(kind)
        params = [Param("pointer", name) for name in "abc"] + [Param("i32", v) for v in (SIZE.m, SIZE.n, SIZE.k)]
        launch = Launch(str(folder / kind), "k", (1, 1, 1), (32, 1, 1), 0, tuple(params), (Buffer("workspace", 64),))
        found.append((Config(kind, 16, 16, 16, group_m=number + 1), launch))
    return tuple(found)


def ask(bench: DeviceWorker, kind: str, given: Any = (), **more: Any) -> list[Any]:
    """All answers, the first line about the operands left out; SystemExit stands for the end of the process."""
    request = Request(
        kind, SIZE, target_files.load_target("sm90"), MeasureProtocol(rotating_mb=1), "nvidia", 0, tuple(given), **more
    )
    answers: list[Any] = []
    try:
        answers += bench(request)
    except SystemExit as end:
        answers.append(end)
    assert answers[0].keys() == {"copies", "cold"} and answers[0]["copies"] > 1
    return [a for a in answers[1:] if not (isinstance(a, dict) and "racing" in a)]


def test_screening_times_what_runs_and_names_what_does_not(device: Device, tmp_path: Path) -> None:
    trials: list[Trial] = ask(DeviceWorker(), "screen", candidates(tmp_path, "right", "slow", "refused"))
    assert [t.status for t in trials] == ["ok", "ok", "out_of_resources"]
    assert [t.seconds for t in trials[:2]] == pytest.approx([3e-6, 50e-6])
    assert [len(t.samples) for t in trials] == [3, 1, 0], "twice as slow as the best is not worth three samples"
    assert {t.timer for t in trials[:2]} == {"graph-events"} and "too much shared memory" in trials[2].reason
    assert device.graphs == 0 and device.modules == 0, "every graph and all code is given back"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process_after_it_was_answered(device: Device, tmp_path: Path, fault: str) -> None:
    """By whatever name: those that come after would only be refused by a device that is lost."""
    *trials, end = ask(DeviceWorker(), "screen", candidates(tmp_path, "right", fault, "slow"))
    assert [t.status for t in trials] == ["ok", "crashed"] and isinstance(end, SystemExit)
    assert FAULTS[fault] in trials[1].reason


def test_a_final_checks_everybody_and_races_those_that_are_right(device: Device, tmp_path: Path) -> None:
    given = candidates(tmp_path, "right", "wrong", "lazy", "faster")
    *trials, samples = ask(DeviceWorker(), "final", given, library="torch")
    assert [t.status for t in trials] == ["ok", "wrong", "wrong", "ok"]
    assert all(t.error is not None and t.error <= t.tolerance for t in trials if t.status == "ok")
    assert trials[2].error == float("inf"), "what nobody wrote is poison"
    names = {c.template: c.name for c, _ in given}
    assert samples.keys() == {names["right"], names["faster"], ""}
    assert np.median(samples[names["faster"]]) == pytest.approx(2e-6)
    assert np.median(samples[names["right"]]) == pytest.approx(3e-6)
    assert device.graphs == 0 and device.modules == 0


def test_each_sample_of_a_race_follows_the_same_kernel(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[float] = []
    monkeypatch.setattr(device_worker, "LeadInKernel", lambda place: lambda: before.append(device.now))
    *_, samples = ask(DeviceWorker(), "final", candidates(tmp_path, "right", "faster"), library="torch")
    assert len(before) == sum(map(len, samples.values())) and len(set(before)) == len(before)


def test_a_watched_race_names_who_runs(device: Device, tmp_path: Path) -> None:
    for watched in (False, True):
        given = (SIZE, target_files.load_target("sm90"), MeasureProtocol(rotating_mb=1), "nvidia", 0)
        request = Request("final", *given, candidates(tmp_path, "right", "faster"), "torch", watched=watched)
        *answers, samples = DeviceWorker()(request)
        named = Counter(a["racing"] for a in answers if isinstance(a, dict) and "racing" in a)
        warming = {name: 1 + (name == "") for name in samples}  # nobody is named once all have warmed up
        assert named == Counter({n: warming[n] + watched * len(s) for n, s in samples.items()})


def test_a_race_rests_as_long_as_it_works_where_arithmetic_draws_power(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(operand_sets.time, "sleep", rests.append)
    for m in (512, 1):
        request = Request(
            "final",
            Problem(m, 512, 512),
            target_files.load_target("sm90"),
            MeasureProtocol(rotating_mb=1),
            "nvidia",
            0,
            (),
        )
        OperandSets(request, device, 7).rest(m * 1e-6)  # type: ignore[arg-type]
    assert rests == [512e-6]


def test_a_check_races_nobody(device: Device, tmp_path: Path) -> None:
    (trial,) = ask(DeviceWorker(), "check", candidates(tmp_path, "right"))
    assert trial.status == "ok" and trial.error is not None and not trial.samples
    assert device.graphs == 0 and device.modules == 0


def test_all_that_a_size_holds_is_counted(device: Device, tmp_path: Path) -> None:
    """Sizes wait for their next turn on the device, and the oldest go where they take too much of it."""
    bench = DeviceWorker()
    ((config, launch),) = candidates(tmp_path, "right")
    ask(bench, "screen", [(config, replace(launch, buffers=()))])
    (work,) = bench._benches.values()
    before = work.bytes
    assert before == work.copies * 4 * (SIZE.m * SIZE.k + SIZE.k * SIZE.n + SIZE.m * SIZE.n)
    ask(bench, "check", [(config, replace(launch, buffers=(Buffer("workspace", 5000),)))])
    assert work.bytes == before + 5000 + 8 * SIZE.m * SIZE.n, "the reference, and the largest workspace"


def test_copies_lie_side_by_side_as_they_were_laid_out(device: Device) -> None:
    """B is column-major, and no size here is a multiple of what places are aligned to."""
    request = Request(
        "screen", replace(SIZE, row_major_b=False), target_files.load_target("sm90"), MeasureProtocol(), "nvidia", 0, ()
    )
    sets = OperandSets(request, device, 7).sets
    assert len(sets) > 2
    places = [t.data_ptr() for s in sets for t in (s["a"], s["b"], s["c"])]
    aligned = [-(-4 * n // operand_sets.ALIGNED) * operand_sets.ALIGNED for n in (24 * 16, 16 * 40, 24 * 40)]
    assert [q - p for p, q in pairwise(places)] == (aligned * len(sets))[:-1]
    for s in sets:
        assert s["a"].stride() == (16, 1) and s["b"].stride() == (1, 16) and s["c"].stride() == (40, 1)
        assert torch.equal(s["a"], sets[0]["a"]) and torch.equal(s["b"], sets[0]["b"])
    sets[0]["b"].fill_(7.0)
    assert not (sets[1]["b"] == 7.0).any() and not (sets[0]["a"] == 7.0).any(), "and none overlap"


def test_libraries_list_and_race_their_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (configs,) = ask(DeviceWorker(), "enumerate", library="torch", most=1)
    assert configs and {c.backend for c in configs} == {"torch"}
    trials = ask(DeviceWorker(), "screen", [(c, None) for c in configs])
    assert [t.status for t in trials] == ["ok"], [t.reason for t in trials]
    doubled = registry.load("backends", "torch")
    monkeypatch.setattr(doubled, "operation", lambda problem, operands, config=None: lambda: operands["c"].fill_(9))
    (trial,) = ask(DeviceWorker(), "screen", [(configs[0], None)])
    assert trial.status == "wrong", "a library is checked before it is timed"
    monkeypatch.setattr(DeviceWorker, "SEEN", SIZE.n * 5)  # every fifth row of a C that is larger
    (trial,) = ask(DeviceWorker(), "screen", [(configs[0], None)])
    assert trial.status == "wrong", "a look at some rows sees what is wrong in all"


@pytest.mark.parametrize(("kind", "name"), [("tires", "ILLEGAL_ADDRESS"), ("balks", "OUT_OF_MEMORY")])
def test_who_faults_in_the_race_is_named(device: Device, tmp_path: Path, kind: str, name: str) -> None:
    """The parent leaves it out and has the others race again, whether the device is lost or not."""
    given = candidates(tmp_path, "right", kind, "faster")
    *trials, stumble, end = ask(DeviceWorker(), "final", given, library="torch")
    assert [t.status for t in trials] == ["ok"] * 3 and isinstance(end, SystemExit)
    assert (stumble.config, stumble.status, stumble.stage) == (given[1][0], "crashed", "final")
    assert f"in the race: graph_launch failed: CUDA_ERROR_{name}" in stumble.reason
    assert device.graphs == 0 and device.modules == 0


def test_shared_memory_is_there_before_a_graph_holds_its_address(device: Device, tmp_path: Path) -> None:
    """The second needs more than the first, whose captured launches point to what they were given."""
    given = [
        (config, replace(launch, buffers=(Buffer("workspace", size), Buffer("semaphore", size // 4))))
        for (config, launch), size in zip(candidates(tmp_path, "right", "faster"), (4096, 1 << 20), strict=True)
    ]
    bench = DeviceWorker()
    seen: list[tuple[int, int, bool]] = []
    calls = OperandSets.calls

    def watched(self: OperandSets, *args: Any) -> Any:
        made = calls(self, *args)
        counters = self._scratch["semaphore"]
        seen.append((self.scratch("workspace", 1), counters.data_ptr(), not counters.any()))
        counters.fill_(1)  # what a faulty candidate leaves
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperandSets, "calls", watched)
        *trials, _ = ask(bench, "final", given)
    assert [t.status for t in trials] == ["ok", "ok"] and seen[0] == seen[1]
    assert seen[0][2], "and the counters are zero for each"

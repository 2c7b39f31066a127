import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import raising
from tests.support.host_device import FAULTS, Device, gpu_on_host, host_launch
from tests.support.nouns import Config, Groups, Launch, LibraryBackend, MeasureProtocol, Operands, Patch, registry
from tritongemm.core.errors import UnavailableError
from tritongemm.core.launch import Buffer
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure import jobs, operand_sets, race
from tritongemm.measure.device_worker import DeviceWorker
from tritongemm.measure.guarded_operands import copy_guarded
from tritongemm.measure.operand_sets import OperandSets
from tritongemm.search_spaces import loader as target_files

SIZE = Problem(24, 40, 16, *matrices("fp32"))
PROTOCOL = MeasureProtocol(rotating_mb=1)


@pytest.fixture
def device(monkeypatch: Patch) -> Iterator[Device]:
    with gpu_on_host(monkeypatch) as made:
        yield made


def candidates(folder: Path, *kinds: str) -> tuple[jobs.LaunchCandidate, ...]:
    return tuple(
        jobs.LaunchCandidate(Config(kind, 16, 16, 16, group_m=number), host_launch(folder, kind, SIZE))
        for number, kind in enumerate(kinds, 1)
    )


def setup_of(problem: Problem = SIZE, protocol: MeasureProtocol = PROTOCOL) -> jobs.MeasureSetup:
    return jobs.MeasureSetup(problem, target_files.load_target("sm90"), protocol, "nvidia", 0)


def ask(worker: DeviceWorker, job: jobs.MeasureJob) -> list[Any]:
    """All answers but those on the operands and on who runs; SystemExit stands for the end of the process."""
    answers: list[Any] = []
    try:
        answers += worker(job)
    except SystemExit as end:
        answers.append(end)
    assert isinstance(answers[0], jobs.OperandsReady) and answers[0].copies > 1
    return [a for a in answers[1:] if not isinstance(a, jobs.NowRacing)]


def screen(given: Sequence[jobs.LaunchCandidate], worker: DeviceWorker | None = None) -> list[Any]:
    return ask(worker or DeviceWorker(), jobs.ScreenJob(setup_of(), tuple(given), math.inf))


def verify(given: Sequence[jobs.LaunchCandidate], worker: DeviceWorker | None = None) -> list[Any]:
    return ask(worker or DeviceWorker(), jobs.VerifyJob(setup_of(), tuple(given)))


def final(
    given: Sequence[jobs.LaunchCandidate], baseline: str = "torch", worker: DeviceWorker | None = None
) -> list[Any]:
    return ask(worker or DeviceWorker(), jobs.RaceJob(setup_of(), tuple(given), baseline))


def test_screening_times_what_runs_and_compares_equal_rows(device: Device, tmp_path: Path) -> None:
    trials: list[Trial] = screen(candidates(tmp_path, "right", "slow", "refused"))
    assert [t.status for t in trials] == ["ok", "ok", "out_of_resources"]
    assert [t.seconds for t in trials[:2]] == pytest.approx([3e-6, 50e-6])
    assert [len(t.samples) for t in trials] == [3, 1, 0], "twice as slow as the best is not worth three samples"
    assert {t.timer for t in trials[:2]} == {"graph-events"} and "too much shared memory" in trials[2].reason
    assert device.graphs == 0 and device.modules == 0, "every graph and all code is given back"
    setup = setup_of(protocol=replace(PROTOCOL, compares_rows=True))
    right, uneven = ask(DeviceWorker(), jobs.VerifyJob(setup, candidates(tmp_path, "right", "uneven")))
    assert right.status == "ok" and len(right.row_bits) == 16
    assert uneven.status == "wrong" and uneven.reason == "equal rows 0 and 23 of a batch of 24 have other bits"
    assert device.modules == 0 and not verify(candidates(tmp_path, "right"))[0].row_bits


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process_after_it_was_answered(device: Device, tmp_path: Path, fault: str) -> None:
    """By whatever name: those that come after would only be refused by a device that is lost."""
    *trials, end = screen(candidates(tmp_path, "right", fault, "slow"))
    assert [t.status for t in trials] == ["ok", "crashed"] and isinstance(end, SystemExit)
    assert FAULTS[fault] in trials[1].reason


def test_a_final_races_those_that_are_right_and_names_who_runs(device: Device, tmp_path: Path) -> None:
    given = candidates(tmp_path, "right", "wrong", "lazy", "faster")
    *trials, answer = final(given)
    samples = answer.samples
    assert [t.status for t in trials] == ["ok", "wrong", "wrong", "ok"]
    assert all(t.error is not None and t.error <= t.tolerance for t in trials if t.status == "ok")
    assert trials[2].error == float("inf"), "what was not written is poison"
    names = {c.config.template: c.config.name for c in given}
    assert samples.keys() == {names["right"], names["faster"], BASELINE_ENTRY}
    assert np.median(samples[names["faster"]]) == pytest.approx(2e-6)
    assert np.median(samples[names["right"]]) == pytest.approx(3e-6) and device.graphs == 0 and device.modules == 0
    for reported in (False, True):
        job = jobs.RaceJob(setup_of(), candidates(tmp_path, "right", "faster"), "torch", names_runners=reported)
        *answers, last = DeviceWorker()(job)
        assert isinstance(last, jobs.RaceSamples)
        named = Counter(a.name for a in answers if isinstance(a, jobs.NowRacing))
        expected = Counter({name: 1 + reported * len(samples) for name, samples in last.samples.items()})
        assert named == expected + Counter([""]), "the warm-ups are named, then their end"


def test_who_reads_beyond_an_operand_faults_in_the_final(device: Device, tmp_path: Path) -> None:
    """Its result is right, and what it reads is there in the screen: another operand."""
    given = candidates(tmp_path, "right", "beyond", "faster")
    assert [t.status for t in screen(given)] == ["ok", "ok", "ok"]
    *trials, end = final(given)
    assert [t.status for t in trials] == ["ok", "crashed"] and isinstance(end, SystemExit)
    assert FAULTS["faults"] in trials[1].reason


def test_devices_without_guarded_memory_verify_all_the_same(device: Device, tmp_path: Path, monkeypatch: Patch) -> None:
    error = UnavailableError("the driver has no hipMemCreate; a newer driver is needed")
    monkeypatch.setattr(Device, "guarded_memory", raising(error))
    assert [t.status for t in verify(candidates(tmp_path, "right", "wrong"))] == ["ok", "wrong"]


def test_operands_of_much_of_the_free_memory_are_verified_where_they_are(device: Device, monkeypatch: Patch) -> None:
    operands = {"a": torch.ones(100), "b": torch.ones(20, 5).T, "c": torch.zeros(0, 5)}
    for free, found in ((3200, True), (3199, False)):
        monkeypatch.setattr(Device, "memory", lambda _, free=free: (free, 1 << 34))
        copies = copy_guarded(operands, device)  # type: ignore[arg-type]
        assert (copies is not None) is found
        if copies:
            assert all(torch.equal(copies.tensors[name], tensor) for name, tensor in operands.items())
            assert copies.tensors["b"].stride() == operands["b"].stride()


def test_samples_follow_the_same_kernel_and_checks_no_race(device: Device, tmp_path: Path, monkeypatch: Patch) -> None:
    (trial,) = verify(candidates(tmp_path, "right"))
    assert trial.status == "ok" and trial.error is not None and not trial.samples
    assert device.graphs == 0 and device.modules == 0
    before: list[float] = []
    monkeypatch.setattr(race, "LeadInKernel", lambda torch_device: lambda: before.append(device.now))
    *_, answer = final(candidates(tmp_path, "right", "faster"))
    assert len(before) == sum(map(len, answer.samples.values())) and len(set(before)) == len(before)


def test_the_order_of_a_race_is_that_of_the_seed(device: Device, tmp_path: Path) -> None:
    """Rounds are drawn one by one from the protocol's seed, among those that still race."""
    given = candidates(tmp_path, "right", "faster")
    *answers, _ = DeviceWorker()(jobs.RaceJob(setup_of(), given, "torch", names_runners=True))
    named = [a.name for a in answers if isinstance(a, jobs.NowRacing)]
    entries = [given[0].config.name, given[1].config.name, BASELINE_ENTRY]
    order = random.Random(PROTOCOL.seed)
    rounds = [order.sample(entries, len(entries)) for _ in range(2)]
    assert named[: 4 + 6] == [*entries, "", *rounds[0], *rounds[1]]


def test_a_race_rests_as_long_as_it_works_where_arithmetic_draws_power(device: Device, monkeypatch: Patch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    for m in (512, 1):
        OperandSets(setup_of(Problem(m, 512, 512)), device, 7).rest(m * 1e-6)  # type: ignore[arg-type]
    assert rests == [512e-6]


def test_all_that_a_size_holds_is_counted(device: Device, tmp_path: Path) -> None:
    """Sizes wait for their next turn on the device, and the oldest go where they take too much of it."""
    worker = DeviceWorker()
    (given,) = candidates(tmp_path, "right")
    screen([sized(given)], worker)
    (work,) = worker._operand_sets.values()
    before = work.bytes
    assert before == work.copies * 4 * (SIZE.m * SIZE.k + SIZE.k * SIZE.n + SIZE.m * SIZE.n)
    verify([sized(given, Buffer("workspace", 5000))], worker)
    assert work.bytes == before + 5000 + 8 * SIZE.m * SIZE.n, "the reference, and the largest workspace"


def test_a_result_that_a_library_allocates_in_its_pool_is_returned(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    assert operand_sets._allocate_in(None, lambda: 3) == 3


def sized(candidate: jobs.LaunchCandidate, *buffers: Buffer) -> jobs.LaunchCandidate:
    assert isinstance(candidate.launch, Launch)
    return replace(candidate, launch=replace(candidate.launch, buffers=buffers))


def test_copies_are_side_by_side_as_they_were_laid_out(device: Device) -> None:
    """B is column-major, and no size here is a multiple of what places are aligned to."""
    sets = OperandSets(setup_of(replace(SIZE, b=SIZE.b._replace(row_major=False)), MeasureProtocol()), device, 7).sets  # type: ignore[arg-type]
    assert len(sets) > 2
    places = [t.data_ptr() for s in sets for t in (s["a"], s["b"], s["c"])]
    unit = operand_sets.ALIGNMENT_BYTES
    aligned = [-(-4 * n // unit) * unit for n in (24 * 16, 16 * 40, 24 * 40)]
    assert [q - p for p, q in pairwise(places)] == (aligned * len(sets))[:-1]
    for s in sets:
        assert s["a"].stride() == (16, 1) and s["b"].stride() == (1, 16) and s["c"].stride() == (40, 1)
        assert torch.equal(s["a"], sets[0]["a"]) and torch.equal(s["b"], sets[0]["b"])
    sets[0]["b"].fill_(7.0)
    assert not (sets[1]["b"] == 7.0).any() and not (sets[0]["a"] == 7.0).any(), "and none overlap"


def test_groups_of_any_m_share_their_weights_and_each_copy_reads_those_of_others(device: Device) -> None:
    of_groups = replace(SIZE, m=3, n=256, k=512, groups=Groups(8))
    held, worker = [], DeviceWorker()
    for m in (3, 40):
        list(worker(jobs.ScreenJob(setup_of(of_groups.at(m)), (), math.inf)))
        held.append(worker._operand_sets[of_groups.at(m), PROTOCOL])
    few, many = held
    assert few.sets[0]["b"] is many.sets[0]["b"] and worker._held_bytes() < 2 * few.weights["b"].nbytes
    assert {one["b"].data_ptr() for one in few.sets} == {few.weights["b"].data_ptr()} and few.copies == 2
    assert [one["offsets"].tolist() for one in few.sets] == [[1, 2, 3, 3, 3, 3, 3, 3], [0, 0, 0, 0, 1, 2, 3, 3]]
    assert many.sets[0]["a"].shape == (40, 512) and many.sets[1]["offsets"].tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert torch.equal(few.reference[0], few.sets[0]["a"][0].double() @ few.weights["b"][0].double())
    apart = replace(of_groups, groups=Groups(8, spread="captured", counts=(0, 2, 0, 0, 0, 1, 0, 0)))
    ends = [one["offsets"] for one in OperandSets(setup_of(apart), device, 7).sets]  # type: ignore[arg-type]
    used = [set(torch.diff(one, prepend=torch.tensor([0])).nonzero().flatten().tolist()) for one in ends]
    assert used[0] == {1, 5} and len(used) == 2 and not used[0] & used[1], "groups without rows may be between them"
    small = OperandSets(setup_of(replace(of_groups, k=64)), device, 7)  # type: ignore[arg-type]
    assert not small.weights and small.sets[0]["b"] is not small.sets[1]["b"]


def test_libraries_list_and_race_their_own(device: Device, monkeypatch: Patch) -> None:
    (answer,) = ask(DeviceWorker(), jobs.AlgorithmsJob(setup_of(), "torch", 1))
    assert isinstance(answer, jobs.Algorithms) and {c.backend for c in answer.configs} == {"torch"}
    given = [jobs.LaunchCandidate(config, None) for config in answer.configs]
    trials = screen(given)
    assert [t.status for t in trials] == ["ok"], [t.reason for t in trials]
    library = registry.get(LibraryBackend, "torch")
    monkeypatch.setattr(library, "operation", lambda problem, operands, config=None: lambda: operands["c"].fill_(9))
    (trial,) = screen(given)
    assert trial.status == "wrong", "a library that is fast is checked"
    (trial,) = ask(DeviceWorker(), jobs.ScreenJob(setup_of(), tuple(given), 1e-12))
    assert trial.status == "ok", "one that won't race is not"
    monkeypatch.setattr(DeviceWorker, "FIRST_LOOK_ELEMENTS", SIZE.n * 5)  # every fifth row of a C that is larger
    (trial,) = screen(given)
    assert trial.status == "wrong", "a look at some rows sees what is wrong in all"


@pytest.mark.parametrize("own_c", [True, False])
@pytest.mark.parametrize("added", [0.0, 1.0])
def test_wrong_libraries_leave(device: Device, tmp_path: Path, monkeypatch: Patch, added: float, own_c: bool) -> None:
    """One element of C is wrong, or none; as some of PyTorch's functions do, it may make C, in another shape."""

    def operation(problem: Problem, operands: Operands, config: Config | None = None) -> Callable[[], object]:
        def run() -> torch.Tensor:
            made = operands["a"] @ operands["b"]
            made[-1, -1] += added
            return made.flatten() if own_c else operands["c"].copy_(made)

        return run

    monkeypatch.setattr(registry.get(LibraryBackend, "torch"), "operation", operation)
    given = candidates(tmp_path, "right")
    found, *said = (a for a in final(given) if not isinstance(a, Trial))
    if added:
        assert isinstance(found, jobs.WrongBaseline) and found.reason.startswith("error ")
        (found,) = said
    assert (BASELINE_ENTRY in found.samples) is not bool(added)
    checked = ask(DeviceWorker(), jobs.VerifyJob(setup_of(), given, "torch"))
    assert isinstance(checked[-1], jobs.WrongBaseline if added else Trial), "a profiler races it in another process"
    assert device.graphs == 0 and device.modules == 0


@pytest.mark.parametrize(("kind", "name"), [("tires", "ILLEGAL_ADDRESS"), ("balks", "OUT_OF_MEMORY")])
def test_who_faults_in_the_race_is_named(device: Device, tmp_path: Path, kind: str, name: str) -> None:
    """The parent leaves it out and has the others race again, whether the device is lost or not."""
    given = candidates(tmp_path, "right", kind, "faster")
    *trials, failed, end = final(given)
    assert [t.status for t in trials] == ["ok"] * 3 and isinstance(end, SystemExit)
    assert (failed.config, failed.status, failed.stage) == (given[1].config, "crashed", "final")
    assert f"in the race: graph_launch failed: CUDA_ERROR_{name}" in failed.reason
    assert device.graphs == 0 and device.modules == 0


def test_shared_memory_is_there_before_a_graph_holds_its_address(device: Device, tmp_path: Path) -> None:
    """The second needs more than the first, whose captured launches point to what they were given."""
    given = [
        sized(candidate, Buffer("workspace", size), Buffer("semaphore", size // 4))
        for candidate, size in zip(candidates(tmp_path, "right", "faster"), (4096, 1 << 20), strict=True)
    ]
    seen: list[tuple[int, int, bool]] = []
    prepare = OperandSets.prepare

    def watched(self: OperandSets, *args: Any) -> Any:
        prepared = prepare(self, *args)
        counters = self._buffers["semaphore"]
        seen.append((self.buffer_address("workspace", 1), counters.data_ptr(), not counters.any()))
        counters.fill_(1)  # what a faulty candidate leaves
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperandSets, "prepare", watched)
        *trials, _ = final(given, baseline="")
    assert [t.status for t in trials] == ["ok", "ok"] and seen[0] == seen[1]
    assert seen[0][2], "and the counters are zero for each"

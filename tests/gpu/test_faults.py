import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.nouns import Buffer, BuildPool, Config, Groups, Launch, Machine, MeasureProtocol, Target, registry
from tests.torture.commands import Command, processes_with
from tests.torture.outcome import TortureFailure
from tritongemm.backends.torch.backend import CHOICE
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.measure.choose import choose
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins.contracts import NO_INPUTS, SearchedBackend
from tritongemm.search import planner

PROBLEM = Problem(256, 256, 512)
TIMEOUT = 20.0  # seconds; a first race makes the library's handles, on a host whose cores all work
STORE = "    c_block = c_ptr + row0 * stride_c"
START = "    pid = tl.program_id(0)\n"
LOOP = "for k in range(first, last):"
SPIN = """    seen = tl.load(semaphore_ptr, volatile=True)
    while seen < 1000000:
        seen = tl.load(semaphore_ptr, volatile=True)
"""
# What is done to the text of the kernel. Each candidate has a group_m of its own, so that names differ.
EDITS = {
    "good": (),
    "illegal": ((STORE, STORE.replace("c_ptr", "c_ptr + 35184372088832")),),
    "good too": (),
    "beyond": ((START, START + "    tl.load(a_ptr + M * stride_a, volatile=True)\n"),),  # right all the same
    "hang": ((START, START + SPIN),),
    "wrong": ((LOOP, "for k in range(first, first):"),),  # it reads nothing, so it is the fastest
    "silent": (
        ("tl.store(c_block, ", "tl.store(c_block + 0 * pid, "),
        ("in_m[:, None] & in_n[None, :])", "(rows < 0)[:, None] & in_n[None, :])"),
    ),
    "memory": (),
    "shared": (),
    "good at last": (),
}  # fmt: skip
GOOD = [n for n in EDITS if n.startswith("good")]


def config(name: str) -> Config:
    """Split-K for the one that waits on its counter."""
    return Config("tile", 64, 64, 32, 1 + list(EDITS).index(name), 2 if name == "hang" else 1, 4, 2)


NAMES = {config(n).name: n for n in EDITS}


@dataclass(frozen=True)
class Crew:
    gpu: GpuEvaluator
    built: list[Artifact]


@pytest.fixture(scope="module")
def crew(gpu_machine: Machine, compiler: BuildPool) -> Iterator[Crew]:
    target, backend = gpu_machine.target, registry.get(SearchedBackend, "triton")
    jobs = []
    for name, edits in EDITS.items():
        plain = backend.compile_job(config(name), PROBLEM, target)
        source = plain.identity["source"]
        for old, new in edits:
            assert old in source, f"{name}: the template has changed; edit this test"
            source = source.replace(old, new)
        jobs.append(CompileJob(plain.config, {**plain.identity, "source": source, "edited": name}, plain.payload))
    found = {b.config.name: b for b in compiler.stream(jobs)}
    built = [found[config(n).name] for n in EDITS]
    assert [b.status for b in built] == ["ok"] * len(built), [b.reason for b in built]
    gpu = GpuEvaluator(
        target, gpu_machine.vendor, gpu_machine.devices[0], MeasureProtocol(rotating_mb=0, iters=20), TIMEOUT
    )
    made = backend.launch

    def launch(one: Artifact, problem: Problem, target: Target) -> Launch:
        """As made, but two of them ask for more than there is."""
        plain = made(one, problem, target)
        assert isinstance(plain, Launch)
        if NAMES.get(one.config.name) == "memory":
            return replace(plain, buffers=(Buffer("workspace", 10**14),))
        if NAMES.get(one.config.name) == "shared":
            return replace(plain, shared=10**8)
        return plain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "launch", launch)
        yield Crew(gpu, built)
    gpu.close()


def outcome(trials: Any) -> dict[str, Trial]:
    return {NAMES[t.config.name]: t for t in trials}


def test_screening_goes_on(crew: Crew) -> None:
    trials = list(crew.gpu.screen(PROBLEM, crew.built, float("inf")))
    assert [t.config for t in trials] == [b.config for b in crew.built]
    found = outcome(trials)
    status = {name: t.status for name, t in found.items()}
    assert {n: status[n] for n in GOOD} == dict.fromkeys(GOOD, "ok"), status
    assert all(found[n].seconds > 0 for n in GOOD)
    assert (status["illegal"], status["hang"]) == ("crashed", "timeout")
    assert (status["memory"], status["shared"]) == ("out_of_resources", "out_of_resources")
    assert found["illegal"].reason and found["hang"].reason == f"no answer within {TIMEOUT:g} s; killed"
    assert found["memory"].reason and found["shared"].reason
    # A screen is a time only; that these are wrong comes out in the final.
    assert (status["wrong"], status["silent"], status["beyond"]) == ("ok", "ok", "ok")


def test_a_fast_wrong_kernel_never_wins(crew: Crew) -> None:
    final = crew.gpu.race(PROBLEM, crew.built, "torch")
    found = outcome(final.trials)
    assert found.keys() == EDITS.keys()
    status = {name: t.status for name, t in found.items()}
    assert {n for n, s in status.items() if s == "ok"} == set(GOOD), status
    assert (status["wrong"], status["silent"]) == ("wrong", "wrong")
    assert (status["illegal"], status["beyond"], status["hang"]) == ("crashed", "crashed", "timeout")
    assert found["wrong"].error > 10 * found["wrong"].tolerance  # type: ignore[operator]
    assert found["silent"].error == float("inf"), "nothing wrote the poisoned output"
    assert final.samples.keys() == {config(n).name for n in GOOD} | {BASELINE_ENTRY}
    assert NAMES[choose(final.samples).name] in GOOD
    assert all(found[n].error <= found[n].tolerance for n in GOOD)  # type: ignore[operator]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(64, 128, 256, *matrices("bf16"), bias="n"),
        Problem(64, 128, 256, *matrices("fp8e4m3fn", c="bf16", layout="TN")),
        Problem(64, 128, 256, *matrices("int8", c="int32", layout="TN", shared="b"), batch=3),
        Problem(64, 128, 256, *matrices("bf16", layout="TN"), groups=Groups(4)),
    ],
    ids=str,
)
def test_the_librarys_own_result_is_compared_and_right(crew: Crew, problem: Problem) -> None:
    final = crew.gpu.race(problem, [Artifact(CHOICE, "")], "torch")
    assert not final.library_wrong and BASELINE_ENTRY in final.samples, final


MEASURED = Problem(256, 1024, 1024)
LARGE = Problem(16384, 16384, 16384)  # 1.5 GB of operands
SIZES = [(256, 1024, 1024), (17, 1024, 1024), (100, 777, 512)]
HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
FAULT = """
import torch
try:
    torch.zeros(4, device="cuda")[torch.tensor([1 << 30], device="cuda")]
    torch.cuda.synchronize()
except RuntimeError:
    print("faulted")
"""


@pytest.fixture(scope="module")
def built(gpu_machine: Machine, compiler: BuildPool, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    triton = registry.get(SearchedBackend, "triton")
    plan = planner.plan_search(MEASURED, gpu_machine.target, tmp_path_factory.mktemp("module"), "triton")
    jobs = [triton.compile_job(p.config, MEASURED, gpu_machine.target, NO_INPUTS) for p in plan.order[:32:4]]
    return [artifact for artifact in compiler.stream(jobs) if artifact.status == "ok"]


@contextmanager
def killing(role: str, seed: int, times: int) -> Iterator[list[int]]:
    """Kill the child of this process that has a role, `count` times at random moments; the numbers of those killed."""
    rng, killed, ended = random.Random(seed), list[int](), threading.Event()

    def kill() -> None:
        while len(killed) < times and not ended.wait(rng.uniform(0.3, 1.5)):
            for child in children_with(role):
                os.kill(child, signal.SIGKILL)
                killed.append(child)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def children_with(role: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and role.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def test_a_killed_process_costs_no_candidate(gpu: GpuEvaluator, built: list[Artifact]) -> None:
    """As the system kills one where memory is short: every candidate is tried again, and none is called crashed."""
    with killing("device_worker", 0, 2) as killed:
        rounds = 0
        while rounds < 5 or not killed:
            trials = list(gpu.screen(MEASURED, built, float("inf")))
            assert [t.config for t in trials] == [b.config for b in built]
            assert {t.status for t in trials} == {"ok"}, [t.reason for t in trials]
            rounds += 1
    with killing("device_worker", 1, 1):
        race = gpu.race(MEASURED, built, "torch")
    assert {t.status for t in race.trials} == {"ok"}, [t.reason for t in race.trials]


@pytest.mark.alone
def test_memory_that_another_process_holds(gpu: GpuEvaluator, built: list[Artifact]) -> None:
    """A size whose operands do not fit is refused in words; a smaller one is measured meanwhile, and it later."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(TritonGemmError, match="memory"):
            list(gpu.screen(LARGE, built, float("inf")))
        assert {t.status for t in gpu.screen(MEASURED, built[:2], float("inf"))} == {"ok"}
    finally:
        holder.communicate(b"")
    assert {t.status for t in gpu.verify(LARGE, built[:1])} <= {"ok", "out_of_resources"}


def test_another_process_that_faults(gpu: GpuEvaluator, built: list[Artifact]) -> None:
    others = [subprocess.Popen([sys.executable, "-c", FAULT], stdout=subprocess.PIPE) for _ in range(3)]
    while any(other.poll() is None for other in others):
        assert {t.status for t in gpu.verify(MEASURED, built[:2])} == {"ok"}
    assert [other.communicate()[0] for other in others] == [b"faulted\n"] * 3


def test_a_run_that_is_killed_over_and_over(gpu_machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "sizes.yaml").write_text("".join(f"- {{M: {m}, N: {n}, K: {k}}}\n" for m, n, k in SIZES))
    argv = ["--gemm_size_file", "sizes.yaml", "-o", "out.yaml", "--budget", "24"]
    environment = {"TRITONGEMM_CACHE": str(tmp_path / "cache"), "TRITONGEMM_TORTURE": str(tmp_path)}
    rng = random.Random(2)
    for _ in range(3):
        ended = Command("tune", argv, tmp_path, environment).signalled(signal.SIGKILL, rng.uniform(2, 15))
        deadline = time.monotonic() + 10
        while (alive := processes_with(f"TRITONGEMM_TORTURE={tmp_path}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive, "processes live on after a kill"
    ended = Command("tune", argv, tmp_path, environment).end(300).checked()
    assert ended.status == 0, ended.err
    rows = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert [(row["M"], row["N"], row["K"]) for row in rows] == SIZES
    checked = ["--gemm_size_file", "out.yaml", "--compare_wo_tuning"]
    try:
        assert Command("tune", checked, tmp_path, environment).end(300).checked().status == 0
    except TortureFailure as failure:
        pytest.fail(str(failure))

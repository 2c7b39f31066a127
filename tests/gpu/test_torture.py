"""What may befall a GPU while it is measured on: its process is killed, its memory is taken, another process faults."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.torture.commands import Command, processes_with
from tests.torture.outcome import TortureFailure
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact
from tritongemm.core.errors import TritonGemmError
from tritongemm.core.problem import Problem
from tritongemm.hip_ext.machine import Machine
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import NO_INPUTS, SearchedBackend
from tritongemm.search import planner

PROBLEM = Problem(256, 1024, 1024)
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
    """Kernels that are right."""
    triton = registry.get(SearchedBackend, "triton")
    plan = planner.plan_search(PROBLEM, gpu_machine.target, tmp_path_factory.mktemp("module"), "triton")
    jobs = [triton.compile_job(p.config, PROBLEM, gpu_machine.target, NO_INPUTS) for p in plan.order[:32:4]]
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
    """Children of this process whose command line names a role."""
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
            trials = list(gpu.screen(PROBLEM, built, float("inf")))
            assert [t.config for t in trials] == [b.config for b in built]
            assert {t.status for t in trials} == {"ok"}, [t.reason for t in trials]
            rounds += 1
    with killing("device_worker", 1, 1):
        race = gpu.race(PROBLEM, built, "torch")
    assert {t.status for t in race.trials} == {"ok"}, [t.reason for t in race.trials]


@pytest.mark.alone
def test_memory_that_another_process_holds(gpu: GpuEvaluator, built: list[Artifact]) -> None:
    """A size whose operands do not fit is refused in words; a smaller one is measured meanwhile, and it later."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(TritonGemmError, match="memory"):
            list(gpu.screen(LARGE, built, float("inf")))
        assert {t.status for t in gpu.screen(PROBLEM, built[:2], float("inf"))} == {"ok"}
    finally:
        holder.communicate(b"")
    assert {t.status for t in gpu.verify(LARGE, built[:1])} <= {"ok", "out_of_resources"}


def test_another_process_that_faults(gpu: GpuEvaluator, built: list[Artifact]) -> None:
    """Its fault is its own: what is measured meanwhile is right."""
    others = [subprocess.Popen([sys.executable, "-c", FAULT], stdout=subprocess.PIPE) for _ in range(3)]
    while any(other.poll() is None for other in others):
        assert {t.status for t in gpu.verify(PROBLEM, built[:2])} == {"ok"}
    assert [other.communicate()[0] for other in others] == [b"faulted\n"] * 3


def test_a_run_that_is_killed_over_and_over(gpu_machine: Machine, tmp_path: Path) -> None:
    """Nothing of it lives on, the same command goes on, and what it writes is right."""
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

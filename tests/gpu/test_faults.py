"""Kernels that fault, hang, ask for too much or are wrong cost themselves alone, and none of them wins."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tritongemm.backends.torch.backend import CHOICE
from tritongemm.build.pool import BuildPool
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.group_rows import Groups
from tritongemm.core.launch import Buffer, Launch
from tritongemm.core.problem import Problem, matrices
from tritongemm.core.protocol import MeasureProtocol
from tritongemm.core.target import Target
from tritongemm.core.trial import BASELINE_ENTRY, Trial
from tritongemm.hip_ext.machine import Machine
from tritongemm.measure.choose import choose
from tritongemm.measure.gpu_evaluator import GpuEvaluator
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import SearchedBackend

PROBLEM = Problem(256, 256, 512)
TIMEOUT = 10.0
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
    """A device with a short limit, and what the candidates compiled to."""

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
    """One answer for each candidate, whatever its outcome; the good ones after a fault and a hang have times."""
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
    """The final names the wrong ones with their error and races the right ones with the library alone."""
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
    """Whether it writes C or makes one."""
    final = crew.gpu.race(problem, [Artifact(CHOICE, "")], "torch")
    assert not final.library_wrong and BASELINE_ENTRY in final.samples, final

"""Many problems are planned by processes that may die, which costs nothing but time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tritongemm.core.errors import OutputError
from tritongemm.core.problem import Problem
from tritongemm.search import planner
from tritongemm.search.planner import PlanJob, PlannedProblem, PlanningProcesses, plan_search, plan_searches
from tritongemm.search_spaces import loader as target_files
from tritongemm.workers.child_process import WorkerProcess

GFX942 = target_files.load_target("gfx942")
PROBLEMS = [Problem(16, 16, k) for k in (64, 32)]


@pytest.fixture(autouse=True)
def processes_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems are planned by processes, too."""
    monkeypatch.setattr(planner, "FEW_PROBLEMS", 1)


def signed(problem: Problem, *_: Any) -> PlannedProblem:
    """A plan that holds nothing but who made it."""
    unknown: Any = None
    return PlannedProblem(problem, unknown, unknown, unknown, Path(str(os.getpid())))


class SigningWorker:
    """A process that signs plans."""

    def __call__(self, job: PlanJob) -> Iterator[PlannedProblem]:
        yield signed(job.problem)


class WorkerKilledOnce:
    """A process that is killed when it plans the first problem of all."""

    def __call__(self, job: PlanJob) -> Iterator[PlannedProblem]:
        if not (job.folder / "killed").exists():
            (job.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield signed(job.problem)


class WorkerKilledAlways:
    """A process that is killed when it plans."""

    def __call__(self, job: PlanJob) -> Iterator[PlannedProblem]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield signed(job.problem)


@pytest.mark.parametrize(
    ("worker", "planned_here"), [("SigningWorker", False), ("WorkerKilledOnce", False), ("WorkerKilledAlways", True)]
)
def test_a_process_that_is_killed_costs_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, planned_here: bool
) -> None:
    """The plans come in the order of the problems, from other processes or in the end from this one."""
    monkeypatch.setattr(PlanningProcesses, "ROLE", f"tests.cpu.search.test_planner:{worker}")
    monkeypatch.setattr(planner, "plan_search", signed)
    found = list(plan_searches(PROBLEMS, GFX942, tmp_path, "triton", jobs=2))
    assert [plan.problem for plan in found] == PROBLEMS
    assert {plan.module.name == str(os.getpid()) for plan in found} == {planned_here}


def test_processes_plan_what_this_one_would_and_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[WorkerProcess] = []

    class WatchedProcess(WorkerProcess):
        def __init__(self, role: str) -> None:
            super().__init__(role)
            made.append(self)

    monkeypatch.setattr(planner, "WorkerProcess", WatchedProcess)
    planning = plan_searches(PROBLEMS, GFX942, tmp_path, "triton", jobs=99)
    found = next(planning)
    assert len(made) == len(PROBLEMS), "no more processes than problems"
    planning.close()
    assert not any(child.alive for child in made), "who wants no more leaves none"
    text = found.module.read_text()
    here = plan_search(PROBLEMS[0], GFX942, tmp_path, "triton")
    assert (found.order.configs, text) == (here.order.configs, here.module.read_text())


def test_what_can_not_be_planned_is_told_as_if_it_were_planned_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be written"):
        list(plan_searches(PROBLEMS, GFX942, tmp_path / "file", "triton", jobs=2))

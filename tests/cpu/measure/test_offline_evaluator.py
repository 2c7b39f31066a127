"""The outcome of a candidate whose interpreter ends."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.tables import each
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.measure.interpreting import InterpreterJob
from tritongemm.measure.offline_evaluator import OfflineEvaluator
from tritongemm.search_spaces import loader as target_files
from tritongemm.system.child_process import WorkerDied

KILLED, FAULT = WorkerDied("signal SIGKILL", from_outside=True), WorkerDied("signal SIGSEGV")


@each(
    ("ends", "status", "try_again"),
    [([KILLED], "ok", False), ([KILLED, KILLED], "crashed", True), ([FAULT], "crashed", False)],
)
def test_an_interpreter_that_others_kill_is_no_fault_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch, ends: list[WorkerDied], status: str, try_again: bool
) -> None:
    left = list(ends)

    def ask(job: InterpreterJob, timeout: float) -> Iterator[tuple[float, float]]:
        if left:
            raise left.pop()
        yield 0.0, 1e-3

    with closing(OfflineEvaluator(target_files.load_target("gfx942"), 5.0)) as evaluator:
        monkeypatch.setattr(evaluator._process, "ask", ask)
        trial = evaluator._interpret(Problem(16, 16, 16), Config("tile", 16, 16, 16))
    assert (trial.status, trial.try_again, left) == (status, try_again, [])

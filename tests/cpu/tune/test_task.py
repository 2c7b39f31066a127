"""A size's states: named, and changed only along the line."""

import pytest

from tests.support.tables import each
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.trial import Trial
from tritongemm.tune.task import Task, TaskState

LINE = ["BUILDING", "SEARCHING", "BUILDING", "SEARCHING", "WAITING", "RACING", "DONE"]


def test_a_size_goes_down_the_line() -> None:
    task = Task(Problem(1, 2, 3))
    for name in LINE:
        task.move_to(TaskState[name])
    assert task.finished


@each(("state", "wrong"), [("QUEUED", "RACING"), ("BUILDING", "DONE"), ("DONE", "BUILDING")])
def test_it_does_not_jump(state: str, wrong: str) -> None:
    task = Task(Problem(1, 2, 3), TaskState[state])
    with pytest.raises(ValueError, match=f"1x2x3_fp16_TT can't go from {TaskState[state].value} to"):
        task.move_to(TaskState[wrong])
    assert task.state is TaskState[state]


def test_it_can_fail_anywhere_and_the_first_reason_counts() -> None:
    task = Task(Problem(1, 2, 3), TaskState.RACING)
    task.fail("its operands do not fit")
    task.fail("and more")
    task.move_to(TaskState.FAILED)
    assert task.finished and task.failure == "its operands do not fit"


def test_the_best_time_is_of_trials_that_passed() -> None:
    task, config = Task(Problem(1, 2, 3)), Config("tile", 16, 16, 16)
    task.add_trial(Trial(config, "ok", samples=(2e-6,)))
    task.add_trial(Trial(Config("tile", 16, 16, 32), "wrong", samples=(1e-6,)))
    assert task.best.seconds == 2e-6

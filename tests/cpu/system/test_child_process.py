import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, raising
from tests.support.nouns import ArtifactCache, BuildPool, UnavailableError, apart, fails
from tests.support.processes import becomes_true, is_running
from tritongemm.system import child_process
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

ROLE = "tests.support.child_roles:Role"


@pytest.fixture(scope="module")
def child() -> Iterator[WorkerProcess]:
    """One child for the module; every test leaves it usable, which is the point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        one = WorkerProcess(ROLE, {"TOY_SETTING": "blue"})
        yield one
        one.kill()


def test_answers_come_in_order_and_a_request_that_raises_costs_itself(child: WorkerProcess) -> None:
    assert list(child.ask(("count", 5), 60)) == [0, 1, 2, 3, 4] and list(child.ask(("count", 0), 60)) == []
    (before,) = child.ask(("served", None), 60)
    (after,) = child.ask(("served", None), 60)
    assert after == before + 1, "the same object answers"
    ((_, pid, _),) = child.ask(("environment", ""), 60)
    answers = child.ask(("fail", 2), 60)
    assert [next(answers), next(answers)] == [0, 1]
    fails(WorkerError, r"^ValueError: that can't be$", next, answers)
    fails(WorkerError, "pickle", list, child.ask(("unpicklable", None), 60))
    ((_, same, _),) = child.ask(("environment", ""), 60)
    assert same == pid


def test_its_own_session_and_environment(child: WorkerProcess) -> None:
    ((value, pid, group),) = child.ask(("environment", "TOY_SETTING"), 60)
    assert value == "blue" and "TOY_SETTING" not in os.environ
    assert pid == group != os.getpgid(0), "Ctrl-C at the terminal reaches the parent alone"
    assert child.alive


@apart(
    (("kill", signal.SIGKILL), [1], "signal SIGKILL"),
    (("kill", signal.SIGSEGV), [1], "signal SIGSEGV"),
    (("abort", None), [], "signal SIGSEGV"),  # by an illegal access
    (("leave", 3), [], r"exit status 3: last words$"),
)
def test_a_crash_is_reported_and_another_child_goes_on(
    request_: Any, first: list[int], end: str, /, child: WorkerProcess
) -> None:
    answers = child.ask(request_, 60)
    assert list(islice(answers, len(first))) == first, "what came before the crash is kept"
    fails(WorkerDied, f"^{end}", next, answers)
    assert not child.alive and list(child.ask(("count", 2), 60)) == [0, 1]


def test_an_end_is_not_held_up(child: WorkerProcess) -> None:
    """As a device that is lost may do."""
    started = time.monotonic()
    fails(WorkerDied, "exit status 1: the device is gone", list, child.ask(("linger", "the device is gone"), 5))
    assert time.monotonic() - started < 5


def test_what_hangs_up_but_does_not_end_is_killed(child: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_END_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(WorkerDied, match="signal SIGKILL") as death:
        list(child.ask(("hang_up", None), 5))
    assert not death.value.from_outside, "we killed it"
    assert list(child.ask(("count", 2), 5)) == [0, 1]


def test_a_hang_is_killed_with_what_it_started(child: WorkerProcess, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    list(child.ask(("count", 0), 60))  # started, so that the limit is for the answer
    answers = child.ask(("hang", str(note)), 0.3)
    next(answers)
    own, grandchild = map(int, note.read_text().split())
    assert is_running(own) and is_running(grandchild)
    fails(WorkerTimeout, r"no answer within 0\.3 s", next, answers)
    assert becomes_true(lambda: not is_running(own) and not is_running(grandchild))
    assert list(child.ask(("count", 1), 60)) == [0]


def test_a_child_that_can_not_start(child: WorkerProcess) -> None:
    with pytest.raises(WorkerDied, match="exit status 1: RuntimeError: no coffee"):
        list(WorkerProcess("tests.support.child_roles:Stillborn").ask(1, 60))
    fails(WorkerDied, "ModuleNotFoundError", list, WorkerProcess("a_module_that_is_missing:Role").ask(1, 60))
    late = WorkerProcess(ROLE, startup_s=0.0)
    fails(WorkerTimeout, "did not start within 0 s", list, late.ask(("count", 1), 60))
    assert not late.alive


def test_it_ends_with_its_parent(child: WorkerProcess) -> None:
    """A parent that is killed leaves no child behind: the pipe closes."""
    text = (
        "import os, signal\nfrom tritongemm.system.child_process import WorkerProcess as Child\n"
        "c = Child('tests.support.child_roles:Role')\n((_, pid, _),) = c.ask(('environment', ''), 60)\n"
        "print(pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert becomes_true(lambda: not is_running(int(done.stdout)))


def test_it_ends_with_its_parent_in_the_middle_of_a_request(tmp_path: Path) -> None:
    """Though it computes in C and looks at no pipe; so does a tool that it started."""
    note = tmp_path / "pids"
    text = (
        "from tritongemm.system.child_process import WorkerProcess as Child\n"
        f"list(Child('tests.support.child_roles:Role').ask(('compute', {str(note)!r}), 60))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert becomes_true(lambda: note.exists() and len(note.read_text().split()) == 2)
    parent.kill()
    parent.wait()
    own, tool = map(int, note.read_text().split())
    assert becomes_true(lambda: not is_running(own) and not is_running(tool))


def test_it_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Where it would be found before Triton, and the parent does not look."""
    (tmp_path / "only_here.py").write_text("")
    text = (
        "import sys\nsys.path.remove('')\nfrom tritongemm.system.child_process import WorkerProcess as Child\n"
        "print(*Child('tests.support.child_roles:Role').ask(('find', 'only_here'), 60))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_any_limit_can_be_waited_for(child: WorkerProcess) -> None:
    """Also one that no clock of the system counts to."""
    for limit in (inf, 1e30):
        assert list(child.ask(("count", 2), limit)) == [0, 1]


def test_a_process_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", raising(BlockingIOError(11, "Resource temporarily unavailable")))
    with pytest.raises(UnavailableError, match="no further process can be started: Resource temporarily unavailable"):
        list(WorkerProcess(ROLE).ask(("count", 1), 5))


def test_who_killed_it_is_reported(child: WorkerProcess) -> None:
    """Others kill by two signals; a fault of its own is another, or an exit."""
    for request, from_outside in (
        (("kill", signal.SIGKILL), True),
        (("kill", signal.SIGTERM), True),
        (("kill", signal.SIGABRT), False),
        (("leave", 3), False),
    ):
        with pytest.raises(WorkerDied) as death:
            list(child.ask(request, 60))
        assert death.value.from_outside == from_outside, request


def test_killing_twice_is_harmless(child: WorkerProcess) -> None:
    list(child.ask(("count", 1), 60))
    child.kill()
    child.kill()
    assert not child.alive and list(child.ask(("count", 1), 60)) == [0]


def test_last_words_are_its_own(child: WorkerProcess) -> None:
    """What an earlier request wrote does not explain a later death."""
    fails(WorkerError, "", list, child.ask(("fail", 0), 60))
    fails(WorkerDied, r"^signal SIGKILL$", list, child.ask(("kill", signal.SIGKILL), 60))


def test_compilers_work_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(free: int) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        compiler = BuildPool(ArtifactCache(tmp_path), jobs=16)
        name = str(compiler._temporary.path)
        compiler.close()
        return name

    assert not folder(64 << 20).startswith("/dev/shm/"), "what a container has of it: sixteen compilers need more"
    assert folder(8 << 30).startswith("/dev/shm/") == os.access("/dev/shm", os.W_OK)

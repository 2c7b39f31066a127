import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.support import ROOT, forked, raising
from tests.support.nouns import Defaults, OutputError, Patch, sizes
from tritongemm.workloads.capturing.session import Capture
from tritongemm.workloads.capturing.workload_file import WorkloadFile

PROCESSES, SHAPES, CALLS = 4, 5, 20
OLD = "".join(f"- {{'M': {m}, 'N': 3, 'K': 3}}\n" for m in range(1, 443))

PROGRAM = """
import multiprocessing, os, sys
import torch

torch.set_num_threads(1)  # threads of OpenMP are not forked

def multiply(m):
    for _ in range(5):
        torch.nn.functional.linear(torch.ones(m, 6), torch.ones(7, 6))

if __name__ == "__main__":
    assert sys.argv[1:] == ["-o", "x", "--flag"], sys.argv
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))
    multiply(1)
    for m, method in ((2, "fork"), (3, "spawn")):
        child = multiprocessing.get_context(method).Process(target=multiply, args=(m,))
        child.start()
        child.join()
        assert child.exitcode == 0
    open('/no/such/file')
"""

MANY = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import torch
import tritongemm

path, (processes, shapes, calls) = Path(sys.argv[1]), map(int, sys.argv[2:])
torch.set_num_threads(1)  # threads of OpenMP are not forked

def multiply(first, is_killed):
    with tritongemm.capture(path), torch.no_grad():
        w = torch.ones(7, 6)
        for m in range(first, first + shapes):
            for _ in range(calls):
                torch.nn.functional.linear(torch.ones(m, 6), w)
        if is_killed:
            while f'- {{"M": {first + shapes - 1},' not in path.read_text(encoding="utf-8"):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

context = multiprocessing.get_context("fork")
children = [context.Process(target=multiply, args=(1000 + 100 * i, i == 3)) for i in range(processes)]
for child in children:
    child.start()
for child in children:
    child.join(60)
print(*[child.exitcode for child in children])
"""


ENDS = """
import os, sys
import torch
import tritongemm

torch.set_num_threads(1)  # threads of OpenMP are not forked
with tritongemm.capture(sys.argv[1]):
    for m, end in ((1, lambda: os._exit(status=3)), (2, lambda: os.execlp("true", "true"))):
        child = os.fork()
        if child == 0:
            torch.nn.functional.linear(torch.ones(m, 6), torch.ones(7, 6))
            end()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(os._exit)
"""


def counts(path: Path) -> dict[int, float]:
    return {row.problem.m: row.count for row in sizes.from_file(path, Defaults()) if row.operation}


@pytest.mark.heavy
def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    path.write_text(OLD, encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(MANY, encoding="utf-8")
    command = [str(program), str(path), *map(str, (PROCESSES, SHAPES, CALLS))]
    done = forked.run(command, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == ["0", "0", "0", str(-signal.SIGKILL)], done.stderr
    found = counts(path)
    assert set(found) == {1000 + 100 * i + j for i in range(PROCESSES) for j in range(SHAPES)}
    assert {m for m, count in found.items() if count != CALLS} <= {1300 + j for j in range(SHAPES)}
    assert path.read_text(encoding="utf-8").startswith(OLD)


def test_a_new_shape_is_written_while_the_program_runs(tmp_path: Path) -> None:
    path = tmp_path / "shapes.yaml"
    with Capture(path):
        functional.linear(torch.ones(5, 6), torch.ones(7, 6))
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert counts(path) == {5: 1}


def test_an_unmodified_program_and_its_children_are_captured(tmp_path: Path) -> None:
    program, path = tmp_path / "program.py", tmp_path / "shapes.yaml"
    program.write_text(PROGRAM, encoding="utf-8")
    command = ["-m", "tritongemm", "capture", "-o", str(path), str(program), "-o", "x", "--flag"]
    done = forked.run(command, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT), "AITER_TUNE_GEMM": "1"})
    assert done.returncode == 1 and counts(path) == {1: 5, 2: 5, 3: 5}
    assert sorted(row.problem.m for row in sizes.from_file(tmp_path / "bf16_untuned_gemm.csv", Defaults())) == [1, 2, 3]
    assert re.fullmatch(r"(?s)Traceback.*program.py\", line \d+, in <module>.*FileNotFoundError.*\n", done.stderr)


def test_a_process_that_ends_at_once_or_becomes_another_program_writes_first(tmp_path: Path) -> None:
    program, path = tmp_path / "program.py", tmp_path / "shapes.yaml"
    program.write_text(ENDS, encoding="utf-8")
    done = forked.run([str(program), str(path)], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split("\n")[:3] == ["3", "0", "<built-in function _exit>"], done.stderr
    assert counts(path) == {1: 1, 2: 1}


def test_what_could_not_be_written_at_the_end_is_counted(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(WorkloadFile, "add", raising(OutputError("no room")))
    with pytest.warns(RuntimeWarning, match=r"what was captured is lost \(calls: 3, products: 2\): no room"):  # noqa: SIM117
        with Capture(tmp_path / "shapes.yaml"):
            for m in (5, 5, 8):
                functional.linear(torch.ones(m, 6), torch.ones(7, 6))

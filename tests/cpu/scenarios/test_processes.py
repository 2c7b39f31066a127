import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.processes import becomes_true, is_running
from tests.support.tables import apart, heavy
from tritongemm.tune import search_processes

SIZES = "\n".join(f"- {{M: 64, N: 512, K: {16 * k}}}" for k in range(1, 12 * search_processes.FEW_PROBLEMS))


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    # A shell starts what it runs in the background with Ctrl-C ignored, and so the tests and all that they start.
    heed_ctrl_c = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip


def begin_planning(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    (folder / "sizes.yaml").write_text(SIZES)
    sizes = ["--gemm_size_file", "sizes.yaml", "--target", "gfx942", "--num_threads", "2"]
    run = begin(folder, "tritongemm.tune", *sizes, "--compile_only", "-o", "out.yaml")
    if not becomes_true(lambda: run.poll() is None and len(children(run.pid)) >= 2, seconds=60):
        os.killpg(run.pid, signal.SIGKILL)
        pytest.fail(f"no two planning processes after 60 s: {run.communicate(timeout=10)}")
    return run, children(run.pid)


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_parent) == parent and state != "Z":
            found.append(int(entry.parent.name))
    return found


@apart("tritongemm tune", *(heavy(w) for w in ("tritongemm.tune", "tritongemm export")))
def test_a_command_imports_nothing_from_the_current_folder(words: str, /, tmp_path: Path) -> None:
    """A file there that is called as a package that we use would be run in its place."""
    for package in ("numpy", "yaml", "torch", "triton", "jinja2", "joblib", "argparse"):
        (tmp_path / f"{package}.py").write_text("raise SystemExit('taken from the current folder')\n")
    size = ["-m", "1", "-n", "2", "-k", "3", "--target", "gfx1100", "--budget=1", "--generate-only"]
    tunes = words.endswith("tune")
    run = begin(tmp_path, *words.split(), *(size if tunes else ["--help"]))
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err.count("taken")) == (0, 0), err
    assert ("modules: " if tunes else "usage: ") in out + err


@pytest.mark.heavy
def test_a_run_that_is_killed_leaves_no_process_and_the_next_sweeps_its_files(tmp_path: Path) -> None:
    """No process holds the pipe that a terminal, or what reads the output, waits for."""
    run, planners = begin_planning(tmp_path)
    left = list(tmp_path.glob("tritongemm-*"))
    assert left
    run.kill()
    run.communicate(timeout=10)
    assert becomes_true(lambda: not any(map(is_running, planners))) and all(folder.exists() for folder in left)
    size = ["-m", "1", "-n", "2", "-k", "3", "--target", "gfx1100", "--budget=1", "--generate-only"]
    again = begin(tmp_path, "tritongemm.tune", *size)
    assert again.communicate(timeout=60) and again.returncode == 0 and list(tmp_path.glob("tritongemm-*")) == []


@pytest.mark.heavy  # the next sweeps what a killed run leaves, which is quick
def test_ctrl_c_while_sizes_are_planned_is_one_line(tmp_path: Path) -> None:
    """A terminal sends it to all processes of the run."""
    run, planners = begin_planning(tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    try:
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130 and err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err and "Process" not in err
    assert becomes_true(lambda: not any(map(is_running, planners))) and list(tmp_path.glob("tritongemm-*")) == []

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.nouns import Capsys, InputError, Patch, apart, cases, fails, heavy
from tritongemm.cli import shell
from tritongemm.system import stop_signals

IMPORTS = """import os, signal, sys, time
from tritongemm.cli import shell
from tritongemm.system import stop_signals
"""
RUN = "import sys; from tritongemm.cli import shell; sys.exit(shell.run('command:main'))"


def status_of(error: BaseException) -> int:
    @shell.command
    def main(argv: Sequence[str]) -> int:
        raise error

    return main([])


@cases(
    (InputError("row 1 is wrong"), 2, "error: row 1 is wrong"),
    (InputError("a\x1b[31m\nb"), 2, "error: a\\x1b[31m\\nb"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (MemoryError(), 2, "error: there is not enough memory; use fewer processes (--num_threads), or fewer sizes at"),
    (RecursionError("maximum recursion depth exceeded"), 2, "error: what was read is nested too deeply"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 9999), 2, "error: aaaa"),
    (PermissionError(13, "Permission denied", "/x/y"), 2, "error: /x/y: Permission denied"),
    (OSError("no word of the system"), 2, "error: no word of the system"),
)
def test_what_ends_it_is_said_in_one_line(error: BaseException, status: int, line: str, /, capsys: Capsys) -> None:
    assert status_of(error) == status
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1 and len(err) < 500


def test_faults_keep_their_traceback_and_warnings_are_one_line(monkeypatch: Patch, capsys: Capsys) -> None:
    fails(ValueError, "own fault", status_of, ValueError("own fault"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", shell._show_warning)
        warnings.warn("rows need a newer version\n\x1b[1m", stacklevel=1)
    assert capsys.readouterr().err == "warning: rows need a newer version\\n\\x1b[1m\n"


def test_the_folder_for_temporary_files_is_named(capsys: Capsys, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        assert status_of(OSError(errno.ENOSPC, "No space left on device", f"{tmp_path}/tritongemm-x/y.py")) == 2
    assert "No space left on device; make room there, or name another folder for temporary files in TMPDIR" in (
        capsys.readouterr().err
    )


def started(folder: Path, text: str, streams: str = "", **variables: str) -> subprocess.Popen[str]:
    (folder / "command.py").write_text(f"{IMPORTS}{text}")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **variables}
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", RUN]
    # A signal may be ignored where the tests run, which a command respects.
    return subprocess.Popen(
        line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, restore_signals=True,
        preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


MAIN = "@shell.command\ndef main(argv):\n"
PRINTS = MAIN + (
    "    for _ in range(99999): print('many lines')\n"
    "    print('…', file=sys.stderr, flush=True)\n    sys.stdout.flush()\n    open('done', 'w')\n    return 1\n"
)


@apart(">/dev/full", *(heavy(s) for s in (">/dev/full 2>&1", "2>/dev/full")), ">&- 2>&- <&-")
def test_what_can_not_be_printed_changes_nothing(streams: str, /, tmp_path: Path) -> None:
    """The work is done, and the exit status is the work's."""
    status, _, err = finished(started(tmp_path, PRINTS, streams))
    assert status == 1 and "Traceback" not in err and "Exception" not in err and (tmp_path / "done").exists()


def test_closed_streams_and_readers_that_are_gone_change_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, PRINTS)
    assert process.stdout is not None and process.stderr is not None and process.stdout.readline() == "many lines\n"
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 1 and (tmp_path / "done").exists()
    text = MAIN + "    file = open('results', 'w')\n    os.write(1, b'a compiler prints')\n    return 0\n"
    assert finished(started(tmp_path, text, ">&-"))[0] == 0 and (tmp_path / "results").read_text() == ""


def test_any_locale_prints_any_text_also_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    text = MAIN + "    print('a … \\udcff')\n    return 0\n"
    status, out, err = finished(
        started(tmp_path, text, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="")
    )
    assert (status, out, err) == (0, "a \\u2026 \\udcff\n", "")
    (tmp_path / "gone").mkdir()
    (tmp_path / "command.py").write_text("raise AssertionError('nothing is imported')")
    line = f'cd gone; rmdir ../gone; exec "{sys.executable}" -c "{RUN}"'
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: the current folder is not there any more; change into another one"


READY = "    print('ready', flush=True)\n"
SLEEPS = "    time.sleep(60)\n    return 0\n"


def signalled(process: subprocess.Popen[str], *numbers: int) -> tuple[int, str]:
    """Send signals, each after a line of the process; its exit status and standard error."""
    assert process.stdout is not None
    for number in numbers:
        process.stdout.readline()
        process.send_signal(number)
    status, _, err = finished(process)
    return status, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("text", [f"{MAIN}{READY}{SLEEPS}", "print('ready', flush=True)\ntime.sleep(60)\n"])
def test_a_signal_ends_a_command_with_130(tmp_path: Path, number: signal.Signals, text: str) -> None:
    assert signalled(started(tmp_path, text), number) == (130, "interrupted\n")


def test_a_signal_while_commands_are_imported(tmp_path: Path) -> None:
    finder = "class Slow:\n    def find_spec(self, name, *_):\n        if name == 'tritongemm.cli.shell':\n"
    finder += f"            {READY.strip()}\n            time.sleep(60)\nsys.meta_path.insert(0, Slow())\n"
    text = f"import sys, time\n{finder}from tritongemm.__main__ import main\nmain()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", text], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert signalled(process, signal.SIGINT) == (130, "interrupted\n")


def test_a_signal_that_python_drops_comes_again(tmp_path: Path) -> None:
    """An exception that is raised while an object is being deleted is dropped, and so is one while Python says so."""
    slow = "kind = shell.threading.Thread\nstart = kind.start\nkind.start = lambda t: (start(t), time.sleep(0.1))\n"
    text = "class Deleted:\n    def __del__(self):\n        print('ready', flush=True)\n        time.sleep(60)\n"
    process = started(tmp_path, f"{slow}{text}{MAIN}    Deleted()\n{SLEEPS}")
    assert signalled(process, signal.SIGTERM) == (130, "interrupted\n")


def test_a_signal_within_text_that_is_executed(tmp_path: Path) -> None:
    """Under `python -m` Python would end by the signal, as if no one had caught it."""
    (tmp_path / "opened.py").write_text(RUN)
    text = "print('ready', flush=True); import time; time.sleep(60)"
    (tmp_path / "command.py").write_text(f"from tritongemm.cli import shell\n{MAIN}    exec({text!r})\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "opened"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert signalled(process, signal.SIGTERM) == (130, "interrupted\n")


def test_ignored_signals_and_those_after_the_work_change_nothing(tmp_path: Path) -> None:
    """`nohup` makes a process ignore the end of its terminal."""
    ignored = f"signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{MAIN}{READY}    time.sleep(0.2)\n    return 0\n"
    assert signalled(started(tmp_path, ignored), signal.SIGHUP) == (0, "")
    last = "atexit.register(lambda: (print('ready', flush=True), time.sleep(60)))"
    assert signalled(started(tmp_path, f"import atexit\n{MAIN}    {last}\n    return 1\n"), signal.SIGINT) == (1, "")


def test_a_second_signal_ends_no_merge(tmp_path: Path) -> None:
    merges = (
        f"{MAIN}    try:\n    {READY}        time.sleep(60)\n    except KeyboardInterrupt:\n"
        f"        with stop_signals.uninterrupted():\n        {READY}            time.sleep(0.2)\n"
        "            open('merged', 'w')\n        raise\n"
    )
    status, err = signalled(started(tmp_path, merges), signal.SIGINT, signal.SIGINT)
    assert (status, err) == (130, "interrupted\n") and (tmp_path / "merged").exists()


def test_a_signal_waits_until_a_plug_in_is_imported() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt), stop_signals.postponed():
        signal.raise_signal(signal.SIGINT)
        done.append("imported")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.heavy
def test_a_complete_command_in_a_locale_of_few_letters(tmp_path: Path) -> None:
    """Modules hold letters that it lacks, and so may the folder's name and the file of sizes."""
    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "sizes.yaml").write_text("- {M: 16, N: 16, K: 16}  # größe …\n", encoding="utf-8")
    options = ["--gemm_size_file", "sizes.yaml", "--generate_only", "--target", "gfx1100", "--budget", "1"]
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tritongemm.tune", *options], cwd=folder, env={**os.environ, **locale},
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (module,) = folder.glob("output/*_kernels/generated_kernel_16_16_16.py")
    assert "…" in module.read_text(encoding="utf-8")

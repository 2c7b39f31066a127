"""A program that is captured, and its children that `multiprocessing` starts anew, which are captured into its file.

A forked child has the hooks already. One that is started anew imports what its parent names, so the command that starts
it names `start_if_asked` before all else, which reads TRITONGEMM_CAPTURE. Commands that a program runs by itself, such
as ``subprocess.run([python, "other.py"])``, capture where they import tritongemm.

A process that ends without a word to Python, by ``os._exit`` or by becoming another program, writes what is left first.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing import spawn
from typing import Any

from tritongemm.system import import_path

_START = (
    "import sys; sys.path += {home}; from tritongemm.workloads.capturing import session; session.start_if_asked(); "
)
_command = spawn.get_command_line
# Of `os`; its other functions that replace the process call these.
_ends: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("_exit", "execv", "execve")}


def start_text() -> str:
    """Return what a new Python runs so that it captures if it is asked to, before its program."""
    return _START.format(home=[import_path.HOME])


def cover(finish: Callable[[], None]) -> None:
    """Make children that are started from now on capture, and sudden ends call `finish` first."""
    spawn.get_command_line = _command_that_captures
    for name, end in _ends.items():
        setattr(os, name, partial(_end, finish, end))


def uncover() -> None:
    """Make children that are started from now on capture nothing, and ends as they were."""
    spawn.get_command_line = _command
    for name, end in _ends.items():
        setattr(os, name, end)


def _end(finish: Callable[[], None], end: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        finish()
    finally:
        end(*args, **kwargs)


def _command_that_captures(**kwargs: Any) -> list[str]:
    command: list[str] = _command(**kwargs)
    return [start_text() + word if before == "-c" else word for before, word in pairwise(["", *command])]


_RUN = "from tritongemm.workloads.capturing import child_processes; child_processes.run()"
_SCRIPT, _MODULE = "script", "module"


def command(program: Sequence[str], is_module: bool) -> list[str]:
    """Return the command that starts capturing, then runs a program in the same process."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # multiprocessing uses it too
    kind = _MODULE if is_module else _SCRIPT
    return [sys.executable, *flags, "-c", start_text() + _RUN, kind, *program]


def run() -> None:
    """Run the program that the command line of this process names."""
    kind, name, *args = sys.argv[1:]
    has_current_folder = sys.path[:1] == [""]
    sys.argv = [name, *args]
    if kind == _MODULE:
        sys.path[:1] = [os.getcwd()] if has_current_folder else sys.path[:1]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [os.path.dirname(os.path.abspath(name)), *([] if has_current_folder else sys.path[:1])]
        runpy.run_path(name, run_name="__main__")

"""An unmodified program, run as ``python app.py args …`` or ``python -m module args …`` would."""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence

from tritongemm.workloads.capturing.child_processes import start_text

_RUN = "from tritongemm.workloads.capturing import program; program.run()"
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

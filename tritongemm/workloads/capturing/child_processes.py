"""Children of a program that `multiprocessing` starts anew: they capture too, into the same file.

A forked child has the hooks already. One that is started anew imports what its parent names, so the command that starts
it names `start_if_asked` before all else, which reads TRITONGEMM_CAPTURE. Commands that a program runs by itself, such
as ``subprocess.run([python, "other.py"])``, capture where they import tritongemm.
"""

from __future__ import annotations

from itertools import pairwise
from multiprocessing import spawn
from typing import Any

from tritongemm.core import import_path

_START = (
    "import sys; sys.path += {home}; from tritongemm.workloads.capturing import session; session.start_if_asked(); "
)
_command = spawn.get_command_line


def start_text() -> str:
    """What a new Python runs so that it captures if it is asked to, before its program."""
    return _START.format(home=[import_path.HOME])


def cover() -> None:
    """Make children that are started from now on capture."""
    spawn.get_command_line = _command_that_captures


def uncover() -> None:
    """Make children that are started from now on capture nothing."""
    spawn.get_command_line = _command


def _command_that_captures(**kwargs: Any) -> list[str]:
    command: list[str] = _command(**kwargs)
    return [start_text() + word if before == "-c" else word for before, word in pairwise(["", *command])]

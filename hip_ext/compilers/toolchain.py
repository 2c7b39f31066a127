"""Runs compilers with a time limit, and puts what they print into the message of an error.

A compiler that the system kills, as it does where memory is short, is run once more: its source is not to blame.
"""

import re
import signal
import subprocess
from pathlib import Path

from tritongemm.core.errors import InputError, ToolKilledError

_ATTEMPTS = 2
_VERSION_SECONDS = 60.0  # limit of asking a program for its version
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# What clang and nvcc print when the system killed a program that they had started.
_PART_KILLED = re.compile(r"unable to execute command: (Killed|Terminated)|died due to signal (9|15)\b")


def run(command: list[str], seconds: float) -> str:
    """Run a compiler, and return what it wrote to standard error."""
    done = _completed(command, seconds)
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), done.stderr.strip()[-300:])
        raise InputError(f"{Path(command[0]).name} refuses the source: {first}")
    return done.stderr


def first_line(command: list[str]) -> str:
    """Return what a program prints, such as its version, in one line."""
    done = _completed(command, _VERSION_SECONDS)
    return " ".join((done.stdout or done.stderr).split())


def _completed(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Return a program that has ended by itself; errors are those of `run`."""
    name = Path(command[0]).name
    for _ in range(_ATTEMPTS):
        try:
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired:
            raise InputError(f"{name} took more than {seconds:g} s") from None
        if done.returncode not in _FROM_OUTSIDE and not (done.returncode and _PART_KILLED.search(done.stderr)):
            return done
    raise ToolKilledError(f"{name} was killed {_ATTEMPTS} times; is there enough memory?")

"""Running compilers: their time is limited, and what they say becomes the message of an error."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tritongemm.core.errors import InputError


def run(command: list[str], seconds: float) -> str:
    """Run a compiler; what it said on standard error.

    Raises:
        InputError: it fails or takes longer than `seconds`.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InputError(f"{name} took more than {seconds:g} s") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), done.stderr.strip()[-300:])
        raise InputError(f"{name} refuses the source: {first}")
    return done.stderr


def first_line(command: list[str]) -> str:
    """What a program says about itself, all in one line."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    return " ".join((done.stdout or done.stderr).split())

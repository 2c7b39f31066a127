"""Runs compilers and assemblers with a time limit, and puts what they print into the message of an error.

A compiler that the system kills, as it does where memory is short, is run once more: its source is not to blame.
"""

import re
import shutil
import signal
import subprocess
from importlib import util
from pathlib import Path

from tritongemm.core.errors import InputError, ToolKilledError, UnavailableError
from tritongemm.system.temporary_folder import TemporaryFolder

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


_VERSIONS = ("", *(f"-{v}" for v in range(25, 16, -1)))
_PTX_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
SUFFIXES = (".s", ".ptx")
_SECONDS = 60.0  # limit of assembling one file


def assemble(source: Path, arch: str) -> bytes:
    """Return the code object of AMD assembly (``.s``) or PTX (``.ptx``) for an architecture, e.g. ``gfx942``.

    Raises:
        UnavailableError: no assembler; says what was looked for.
        InputError: the source is refused; carries the assembler's first message.
    """
    with TemporaryFolder() as folder:
        out = folder / "kernel.bin"
        if source.suffix == ".ptx":
            target = _PTX_TARGET.search(source.read_text(encoding="utf-8", errors="replace"))
            run(
                [
                    _ptxas(),
                    "--gpu-name",
                    target[1] if target else arch.replace("sm", "sm_"),
                    str(source),
                    "-o",
                    str(out),
                ],
                _SECONDS,
            )
        else:
            middle = str(folder / "kernel.o")
            clang = [find("clang"), "-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
            run([*clang, "-c", str(source), "-o", middle], _SECONDS)
            run([find("ld.lld"), "-shared", middle, "-o", str(out)], _SECONDS)
        return out.read_bytes()


def find(tool: str) -> str:
    """Return the path of a tool of LLVM, from the PATH or ROCm."""
    for version in _VERSIONS:
        found = shutil.which(tool + version)
        if found:
            return found
    bundled = Path("/opt/rocm/llvm/bin") / tool
    if bundled.is_file():
        return str(bundled)
    raise UnavailableError(
        f"{tool} is needed to assemble; neither the PATH nor {bundled.parent} has it (or {tool}-22 …)"
    )


def _ptxas() -> str:
    found = shutil.which("ptxas")
    spec = util.find_spec("triton")
    bundled = [Path(p) / "backends/nvidia/bin/ptxas" for p in (spec.submodule_search_locations or [])] if spec else []
    for path in (Path(found) if found else None, *bundled):
        if path is not None and path.is_file():
            return str(path)
    raise UnavailableError("ptxas is needed to assemble PTX; neither the PATH nor the triton package has it")

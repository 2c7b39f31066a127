"""Python programs in processes forked from one that has imported PyTorch: the import takes longer than most of them."""

import multiprocessing
import os
import runpy
import site
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# Not Triton, which reads variables when it is imported. Whatever is captured needs the second, which takes 0.5 s.
_CONTEXT.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes"])
_PYTHONS_OWN = sys.prefix, sys.base_prefix, site.getuserbase()


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """What ``python ARGUMENTS`` ends with and writes.

    For programs that do not care how they were started: who tests that starts a process of its own.

    Args:
        arguments: a script, ``-m MODULE`` or ``-c CODE``, and what the program gets.
        folder: the current folder.
        environment: all variables.
        timeout: seconds.

    Returns:
        The exit status and what was written to stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    with tempfile.TemporaryDirectory() as written:
        paths = Path(written, "out"), Path(written, "err")
        status = end(arguments, folder, environment, timeout, paths)
        out, err = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
    return subprocess.CompletedProcess(arguments, status, out, err)


def end(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float, paths: tuple[Path, Path]
) -> int:
    """The exit status of a program that writes to these files or terminals; else as `run`."""
    process = _CONTEXT.Process(target=_become, args=(list(arguments), str(folder), dict(environment), paths))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, timeout)
    return process.exitcode


def _become(arguments: list[str], folder: str, environment: dict[str, str], paths: tuple[Path, Path]) -> None:
    """Be the program, with the path that a new process would have."""
    for stream, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own = [entry for entry in sys.path if entry.startswith(_PYTHONS_OWN)]
    named = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kind, *rest = arguments
    first = {"-c": "", "-m": folder}.get(kind, os.path.dirname(kind))
    sys.path[:] = [first, *named, *own]
    sys.argv[:] = ["-c", *rest[1:]] if kind == "-c" else rest if kind == "-m" else arguments
    if kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")

"""Python programs in processes forked from one that has imported PyTorch: the import takes longer than most of them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # else a program would find the package imported
    from tritongemm.system.child_process import WorkerProcess

_CONTEXT = multiprocessing.get_context("forkserver")
# Not Triton, which reads variables when it is imported. Whatever is captured needs the second, which takes 0.5 s.
_CONTEXT.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes"])
_PYTHONS_OWN = sys.prefix, sys.base_prefix, site.getuserbase()


class Program(NamedTuple):
    """What ``python ARGUMENTS`` is: a script, ``-m MODULE`` or ``-c CODE``, and what the program gets."""

    arguments: Sequence[str]
    folder: Path  # the current one
    environment: Mapping[str, str] = os.environ
    timeout: float = 120.0  # seconds


def run(*program: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a `Program` of these fields ends with and writes.

    For programs that do not care how they were started: who tests that starts a process of its own.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was killed.
    """
    return _run(Program(*program, **options), _CONTEXT)


def interpreted(interpreter: WorkerProcess, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The same of a program whose kernels Triton interprets, forked from a process that does so."""
    asked = Program(arguments, folder, {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder)})
    done: subprocess.CompletedProcess[str]
    (done,) = interpreter.ask(asked, asked.timeout)
    return done


def answer(program: Program) -> Iterator[subprocess.CompletedProcess[str]]:
    """The interpreting process's answer."""
    yield _run(program, multiprocessing.get_context("fork"))


def _run(program: Program, context: Any) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as written:
        paths = Path(written, "out"), Path(written, "err")
        status = end(program, paths, context)
        out, err = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
    return subprocess.CompletedProcess(program.arguments, status, out, err)


def end(program: Program, paths: tuple[Path, Path], context: Any = _CONTEXT) -> int:
    """The exit status of a program that writes to these files or terminals; else as `run`."""
    arguments, folder, environment, timeout = program
    process = context.Process(target=_become, args=(list(arguments), str(folder), dict(environment), paths))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, timeout)
    return int(process.exitcode)


def _become(arguments: list[str], folder: str, environment: dict[str, str], paths: tuple[Path, Path]) -> None:
    """Be the program, with the path that a new process would have."""
    for stream, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.manual_seed(0)  # whatever ran in the process that it is forked from
    own = [entry for entry in sys.path if entry.startswith(_PYTHONS_OWN)]
    named = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kind, *rest = arguments
    sys.path[:] = [{"-c": "", "-m": folder}.get(kind, os.path.dirname(kind)), *named, *own]
    sys.argv[:] = ["-c", *rest[1:]] if kind == "-c" else rest if kind == "-m" else arguments
    if kind == "-c":
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")

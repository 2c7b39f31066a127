"""Stage: Problem, kept Configs → generated_kernel_<M>_<N>_<K>….py, a module a person can read, run and take away."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tritongemm import registry
from tritongemm.codegen import render
from tritongemm.config import Config
from tritongemm.errors import OutputError
from tritongemm.problem import Problem
from tritongemm.record import Record
from tritongemm.target import Target


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents at once; a reader sees the old text or the new.

    Raises:
        OutputError: it can't be written, e.g. because the disk is full; the old text is still there.
    """
    fresh = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except OSError as error:
        if fresh:
            Path(fresh).unlink(missing_ok=True)
        raise OutputError(
            f"{path} can't be written: {error.strerror}; make room and run the same command again, or choose another "
            "file with -o"
        ) from error


def module(problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
    """Write the module of all candidates; its path."""
    family = registry.load("families", problem.family)
    path = folder / f"{render.module_name(problem)}.py"
    library = registry.load("backends", "torch").in_module(problem)
    numbers = family.tolerance(problem), family.scale(problem)
    write_text(path, render.module(problem, list(configs), target, *numbers, library))
    return path


def winner(record: Record, target: Target, folder: Path) -> Path:
    """Write the winner as a module to paste into a project; its path."""
    how = "predicted" if record.timer == "model" else "measured"
    remark = f"Config {record.config.name}: {record.seconds * 1e6:.2f} us {how} ({record.timer})."
    path = folder / f"{render.module_name(record.problem).replace('generated_kernel', 'gemm')}.py"
    write_text(path, render.winner(record.problem, record.config, target, remark))
    return path

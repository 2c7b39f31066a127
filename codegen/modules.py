"""Writes generated modules, generated_kernel_<M>_<N>_<K>….py, which a person can read, run and take away.

They are for people. Kernels are compiled and interpreted from the text itself, not from these files.
"""

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from tritongemm.codegen import render, template_facts
from tritongemm.core.config import Config
from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.core.target import Target
from tritongemm.core.trial import PREDICTED
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family
from tritongemm.system.files import atomic_write


def candidates_path(problem: Problem, folder: Path) -> Path:
    """Return the path of the module of all candidates."""
    return folder / f"{render.module_name(problem)}.py"


def winner_path(problem: Problem, folder: Path) -> Path:
    """Return the path of the winner's module."""
    return folder / f"{render.module_name(problem).replace('generated_kernel', 'gemm')}.py"


def write_candidates(problem: Problem, configs: Sequence[Config], target: Target, folder: Path) -> Path:
    """Write the module of all candidates, and return its path."""
    family = registry.get(Family, problem.family)
    path = candidates_path(problem, folder)
    library = registry.baseline().torch_function(problem)
    numbers = family.tolerance(problem), family.input_deviation(problem), family.typical_scale(problem)
    atomic_write(path, render.module(problem, list(configs), target, *numbers, library))
    return path


def write_winner(record: Record, target: Target, folder: Path) -> Path:
    """Write the winner as a module to paste into a project, and return its path."""
    how = "predicted" if record.timer == PREDICTED else "measured"
    remark = f"Config {record.config.name}:\n{record.seconds * 1e6:.2f} us {how} ({record.timer})"
    if record.timer != PREDICTED and template_facts.kernel_template(record.config.template).edited:
        remark += " of the form whose assembly the tuner edits.\nThis module has no edits: it can be slower"
        plain = render.without_edits(record.config, record.problem, target.compute_units)
        if plain != record.config:
            remark += f", and has tiles of {plain.block_m} x {plain.block_n}, as wider ones do not compile without them"
    remark += "."
    path = winner_path(record.problem, folder)
    atomic_write(path, render.winner(record.problem, record.config, target, remark))
    return path


@lru_cache(maxsize=256)
def run_text(text: str, name: str) -> ModuleType:
    """Execute a generated text and return it as a module."""
    file = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    # Triton asks `inspect` for a kernel's source and finds it here; an entry without a time is never read again.
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    module = ModuleType(name)
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    return module

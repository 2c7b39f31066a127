"""Shared code of backends that compile C++ instances: their space, its checks and ranking, the host call."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritongemm.core.artifact import Artifact
from tritongemm.core.config import AXES, Config
from tritongemm.core.launch import Buffer, HostLaunch, Param
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.host_calls.shared_object import C_TYPES
from tritongemm.search import space as space_module
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune, rules
from tritongemm.search.pruning.rules import Rule
from tritongemm.search_spaces import loader as target_files

_FAR = 8  # times the largest value of an axis: no rule is checked beyond it
# Of the rules for our own kernels, those that hold for any.
SHARED_RULES = tuple(r for r in rules.RULES if r.name in ("split_k", "fits_m", "fits_n", "fits_k"))


def power_of_two(size: int, most: int) -> int:
    """Return the largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def check_dtypes(problem: Problem, outputs: Collection[str]) -> Support:
    """Say whether a library has instances for a problem's dtypes, by the rules that all libraries share."""
    if problem.a.dtype != problem.b.dtype:
        return Support(f"{problem.a.dtype} times {problem.b.dtype}: both operands must be of one type")
    if problem.c.dtype not in outputs:
        return Support(
            f"{problem.a.dtype} operands give {' or '.join(outputs) or 'nothing'} here, not {problem.c.dtype}"
        )
    return SUPPORTED


def lists_operand(backend: str, target: str, dtype: str) -> bool:
    """Say whether the target's file lists a template of a backend for operands of a dtype."""
    section: dict[str, Any] = target_files.space_file(target).get(backend) or {}
    return any(dtype in template.get("operands", ()) for template in section.get("templates", {}).values())


def check_ranges(backend: str, config: Config, problem: Problem, target: Target) -> Support:
    """Say whether a config has the options that the target's file lists for its template, and numbers in their range.

    Axes may exceed the range by a small factor, as an instance's own rules give a more precise reason for such numbers.
    """
    section: dict[str, Any] = target_files.space_file(target.name).get(backend) or {}
    space = space_module.space(problem, target, backend=backend) if section else None
    listed = {axes.template: dict(axes.values) for axes in (space.axes if space else ())}
    if config.template not in listed:
        return Support(f"{target.name} has no template {config.template} on such operands; only {', '.join(listed)}")
    lists = listed[config.template]
    values = {name: getattr(config, name) for name in AXES} | dict(config.options)
    for name, value in values.items():
        if name not in lists:
            return Support(f"nothing reads {name}; its options can be {', '.join(lists)}")
        most = max(lists[name]) * (_FAR if name in AXES else 1)
        if not min(1, *lists[name]) <= value <= most:
            return Support(f"{name} must be {min(1, *lists[name])} to {most}, not {value}")
    return SUPPORTED


def check_rules(checks: Sequence[Rule], config: Config, problem: Problem, target: Target) -> Support:
    """Say whether a config passes a library's own rules."""
    reasons = (rule.check(config, problem, target) for rule in checks)
    return Support(next(filter(None, reasons), ""))


def rank_configs(
    backend: str,
    problem: Problem,
    target: Target,
    checks: Sequence[Rule],
    preference: Callable[[Config], tuple[int, ...]],
    everything: bool,
) -> list[Config]:
    """Return the configs to try, the predicted fastest first; `preference` orders configs with equal predictions.

    As compiling takes long, only as many are returned as the space allows (``limit``), with few that have the same
    blocks (``alike``), unless `everything` is set. The library's own rules, `checks`, are never skipped.
    """
    section: dict[str, Any] = target_files.space_file(target.name).get(backend) or {}
    if not section:
        return []
    space = space_module.space(problem, target, backend=backend)
    possible = prune.prune(space, problem, target, tuple(checks), never_zero=False).kept
    kept = prune.prune(possible, problem, target, SHARED_RULES).kept
    predicted = sorted(
        cost_model.rank(kept, problem, target), key=lambda p: (round(p.seconds, 9), preference(p.config))
    )
    ranked = [p.config for p in predicted]
    if everything:
        return ranked
    run_time = tuple(section["run_time"])
    taken: list[Config] = []
    alike: dict[tuple[int, ...], int] = {}
    found = []
    for config in ranked:
        instance = at_run_time(config, run_time)
        if instance not in taken:
            tile = (*config.tile, config.option("swap_ab"))
            if len(taken) >= section["limit"] or alike.get(tile, 0) >= section["alike"]:
                continue
            taken.append(instance)
            alike[tile] = alike.get(tile, 0) + 1
        found.append(config)
    return found


def at_run_time(config: Config, names: Sequence[str]) -> Config:
    """Return the config with its run-time options blanked, so that those of one binary are equal."""
    fixed: dict[str, Any] = {n: 1 for n in names if n in AXES}
    options = tuple((k, 0 if k in names else v) for k, v in config.options)
    return replace(config, options=options, **fixed)


def signature(parameters: Sequence[tuple[str, str]]) -> str:
    """Return the parameters of the entry function as C++ declares them: (name, kind) each."""
    return ", ".join(f"{C_TYPES[kind]} {name}" for name, kind in parameters)


def host_call(artifact: Artifact, numbers: dict[str, int], runtime: str = "") -> HostLaunch:
    """Return the call of the entry function, which loads the library `runtime` first.

    `numbers` are the values of those of the artifact's parameters that are no pointers, and ``workspace_bytes``.
    """
    parameters = [(str(name), str(kind)) for name, kind in artifact.launch["parameters"]]
    params = tuple(Param(kind, name if kind == "pointer" else numbers[name]) for name, kind in parameters)
    size = numbers.get("workspace_bytes", 0)
    buffers = (Buffer("workspace", size),) if size else ()
    return HostLaunch(artifact.path, artifact.sha256, "run", params, buffers, runtime)


def leading(problem: Problem) -> dict[str, int]:
    """Return sizes and leading strides in elements, by their parameter names in entry functions."""
    lda, ldb, ldc = problem.leads
    return {"M": problem.m, "N": problem.n, "K": problem.k, "lda": lda, "ldb": ldb, "ldc": ldc}


def fingerprint(*files: Path) -> str:
    """Return a hash of a few files that differs between versions of a header library."""
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]

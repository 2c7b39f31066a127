"""Describes launches as the JSON values of plans (docs/commands.md defines them)."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.operands import OperandSpec
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.target import Target
from tritongemm.export import host_launch_plans
from tritongemm.hip_ext.binaries import code_object, hidden_args

_SHORT = {"int8": "i8", "int32": "i32"}  # as the readers of plans spell them


def launch_plans(
    launch: Launch | HostLaunch, problem: Problem, facts: Target
) -> list[tuple[bytes, str, dict[str, Any]]]:
    """Return the code object, its file's suffix and the plan of each kernel that a launch starts, in order.

    Args:
        launch: the launch.
        problem: gives the operands' shapes and dtypes.
        facts: the architecture.

    Raises:
        InputError: it takes tensor maps, which only a driver can make, or its host code can't be run here.
    """
    if isinstance(launch, HostLaunch):
        sizes = {"M": problem.m, "N": problem.n, "K": problem.k}
        return [(c, ".hsaco", p) for c, p in host_launch_plans.plans(launch, facts, _buffers(launch, problem), sizes)]
    return [(launch.read_code(), Path(launch.path).suffix, plan(launch, problem, facts))]


def why_unplanned(launch: Launch | HostLaunch) -> str:
    """Return why no plan can hold a launch; "" where one can."""
    if isinstance(launch, Launch) and any(p.kind == "tma" for p in launch.params):
        return "takes tensor maps, which only a driver can make: no plan can hold them"
    return ""


def plan(launch: Launch, problem: Problem, facts: Target) -> dict[str, Any]:
    """Return a launch as JSON values, without the name of the code object's file.

    Args:
        launch: the launch.
        problem: gives the operands' shapes and dtypes.
        facts: the architecture.

    Raises:
        InputError: the launch takes tensor maps, which only a driver can make.
    """
    reason = why_unplanned(launch)
    if reason:
        raise InputError(f"{launch.symbol} {reason}")
    kernel = next(k for k in code_object.read(launch.read_code()) if k.symbol == launch.symbol)
    known = _buffers(launch, problem)
    buffers = []
    for param, offset in zip(launch.params, launch.offsets(), strict=True):
        # A name that comes back is a parameter the kernel does not read, e.g. the bias of a GEMM without one.
        if param.kind == "pointer" and param.value in known:
            buffers.append({"name": param.value, "offset": offset, **known.pop(str(param.value))})
    return {
        "arch": facts.name,
        "kernel": launch.symbol,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "dynamic_lds": launch.shared,
        "kernarg": hidden_args.append(launch.pack({}), kernel, launch.grid, launch.block, launch.shared).hex(),
        "buffers": buffers,
        "problem": {"M": problem.m, "N": problem.n, "K": problem.k}
        | ({"batch": problem.batch} if problem.batch > 1 else {}),
        "launches": 1,
    }


def _buffers(launch: Launch | HostLaunch, problem: Problem) -> dict[str, dict[str, Any]]:
    known = operands(problem)
    for extra in launch.buffers:
        zero = extra.name == "semaphore"
        known[extra.name] = {**_flat(extra.name, extra.bytes), "init": "zero" if zero else "poison"}
    for zeroed in launch.zeroed if isinstance(launch, Launch) else ():
        known[zeroed.name]["init"] = "zero"
    return known


def operands(problem: Problem) -> dict[str, dict[str, Any]]:
    """Return the operands as a plan describes them: A [M, K], B [K, N], C [M, N], a bias or scales [N] or [M, 1].

    Those of a batch have a dimension for it in front; vectors along N are [batch, 1, N] then, so that they broadcast.
    Scales that change along K state how many rows of A (columns of B) and elements along K share one, and the order.
    """
    if problem.kind == "grouped":
        return _grouped_operands(problem)
    row_major = (problem.row_major_a, problem.row_major_b, True)
    known = {
        name: _operand(problem.operands[name], problem.operands[name].shape, _strides(lead, in_rows))
        for name, lead, in_rows in zip("abc", problem.leads, row_major, strict=True)
    }
    known["c"]["init"] = "poison"
    if problem.order_b != PLAIN:
        known["b"]["order"] = "shuffled"
    for e in problem.extras:
        shape = (1, *e.shape) if e.batch and len(e.shape) == 1 else e.shape
        known[e.name] = _operand(e, shape, (*shape[1:], 1))
    return known


def _grouped_operands(problem: Problem) -> dict[str, dict[str, Any]]:
    """Return operands of grouped products: B [groups, K, N], A and C [M, …] or [groups, room, …], ends or counts."""
    strides = {"b": (problem.k * problem.n, *_strides(problem.leads[1], problem.row_major_b))}
    known = {
        name: _operand(spec, spec.shape, strides.get(name) or _dense(spec.shape))
        for name, spec in problem.operands.items()
    }
    known["c"]["init"] = "poison"
    known[problem.group_operand] |= {"init": "values", "values": list(problem.group_numbers)}
    return known


def _strides(lead: int, row_major: bool) -> tuple[int, int]:
    """Return the strides of a matrix whose rows (or columns) begin `lead` elements apart."""
    return (lead, 1) if row_major else (1, lead)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major array."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _operand(spec: OperandSpec, shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
    """Return one operand, whose products have this shape and strides, and the block that scales along K cover."""
    dtype = spec.dtype
    sized = {"bytes": spec.count * dtype.bytes // dtype.packed, "role": spec.name, "init": "random"}
    apart = (prod(spec.shape),) if spec.batch else ()
    found = {
        **sized,
        "dtype": _SHORT.get(dtype.name, dtype.name),
        "shape": [*spec.lead, *shape],
        "strides": [*apart, *strides],
    }
    if spec.scaling is None or spec.applied != "mainloop":
        return found
    return found | {"scaling": {"rows": spec.scaling.rows, "depth": spec.scaling.depth, "layout": spec.scaling.layout}}


def _flat(role: str, nbytes: int) -> dict[str, Any]:
    return {"bytes": nbytes, "role": role, "dtype": "i32", "shape": [nbytes // 4], "strides": [1]}

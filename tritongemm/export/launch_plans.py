"""Describes launches as the JSON values of plans (docs/reference/commands.md defines them)."""

import hashlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from tritongemm.codegen import render
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch, Launch
from tritongemm.core.operands import OperandSpec
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import code_object, elf
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.hip_ext.host_calls.recording import RecordedLaunch
from tritongemm.system import settings
from tritongemm.system.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout
from tritongemm.system.compiled_files import CompiledFiles

_SECONDS = 120.0


def record(call: HostLaunch, facts: Target) -> list[RecordedLaunch]:
    """Return the launches of a host call, in order."""
    if facts.vendor != "amd":
        raise InputError(
            f"{Path(call.path).name}: only launches of HIP's host code can be recorded; this is {facts.name}'s"
        )
    # Its library holds code for one architecture only, whichever machine this is.
    child = WorkerProcess("tritongemm.hip_ext.host_calls.recording:LaunchRecorder")
    try:
        (found,) = child.ask((call, facts.name, *_runtime(facts)), _SECONDS)
    except (WorkerDied, WorkerTimeout, WorkerError) as error:
        raise InputError(f"{Path(call.path).name}: its host code can't be run: {error}") from None
    finally:
        child.kill()
    launches: list[RecordedLaunch] = found
    return launches


def _runtime(facts: Target) -> tuple[str, str]:
    """Return the recording runtime's library: its path and its hash."""
    values = {"arch": facts.name, "wave": facts.wave_size, "compute_units": facts.compute_units, "lds": facts.lds_bytes}
    source = render.render_cpp("ck/recorder.cpp.j2", **values)
    compiler = hip_compiler.compiler(facts.name)
    key = hashlib.sha256(f"{compiler.version}\n{source}".encode()).hexdigest()[:16]
    kept, name = CompiledFiles(settings.cache_folder()), "recorder.so"
    entry = kept.find(f"recorder-{key}")
    if entry is None:
        entry = kept.keep(f"recorder-{key}", {name: compiler.library(source, ("-std=c++17",), _SECONDS)}, {})
    return str(entry.path / name), hashlib.sha256(entry.files[name]).hexdigest()


def plans(
    call: HostLaunch, facts: Target, known: dict[str, dict[str, Any]], sizes: dict[str, Any]
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the code object and the plan of each launch, without the object's file name."""
    code = elf.device_code(Path(call.path).read_bytes(), facts.name)
    for launch in record(call, facts):
        buffers = []
        for name, offset in launch.pointers.items():
            about = known[name] | ({"init": "zero"} if name in launch.zeroed else {})
            buffers.append({"name": name, "offset": offset, **about})
        yield (
            code,
            {
                "arch": facts.name,
                "kernel": launch.kernel,
                "grid": list(launch.grid),
                "block": list(launch.block),
                "dynamic_lds": launch.dynamic_lds,
                "kernarg": launch.kernarg.hex(),
                "buffers": buffers,
                **sizes,
                "launches": 1,
            },
        )


_SHORT = {"int8": "i8", "int32": "i32"}  # as the readers of plans spell them


def launch_plans(
    launch: Launch | HostLaunch, problem: Problem, facts: Target
) -> list[tuple[bytes, str, dict[str, Any]]]:
    """Return the code object, its file's suffix and the plan of each kernel that a launch starts, in order."""
    if isinstance(launch, HostLaunch):
        return [(c, ".hsaco", p) for c, p in plans(launch, facts, _buffers(launch, problem), _sizes(problem))]
    return [(launch.read_code(), Path(launch.path).suffix, plan(launch, problem, facts))]


def why_unplanned(launch: Launch | HostLaunch) -> str:
    """Return why no plan can hold a launch; "" where one can."""
    if isinstance(launch, Launch) and any(p.kind == "tma" for p in launch.params):
        return "takes tensor maps, which only a driver can make: no plan can hold them"
    return ""


def plan(launch: Launch, problem: Problem, facts: Target) -> dict[str, Any]:
    """Return a launch as JSON values, without the name of the code object's file."""
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
    kernarg = code_object.append_hidden_args(launch.pack({}), kernel, launch.grid, launch.block, launch.shared)
    return {
        "arch": facts.name,
        "kernel": launch.symbol,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "dynamic_lds": launch.shared,
        "kernarg": kernarg.hex(),
        "buffers": buffers,
        **_sizes(problem),
        "launches": 1,
    }


def _sizes(problem: Problem) -> dict[str, Any]:
    more: dict[str, Any] = {"batch": problem.batch} if problem.batch > 1 else {}
    more |= {"epilogue": problem.epilogue} if problem.epilogue != "none" else {}
    return {"problem": {"M": problem.m, "N": problem.n, "K": problem.k, **more}, "product": problem.to_json()}


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
    row_major = (problem.a.row_major, problem.b.row_major, True)
    known = {
        name: _operand(problem.operands[name], problem.operands[name].shape, _strides(lead, in_rows))
        for name, lead, in_rows in zip("abc", problem.leads, row_major, strict=True)
    }
    known["c"]["init"] = "poison"
    if problem.b.order != PLAIN:
        known["b"]["order"] = "shuffled"
    for e in problem.extras:
        shape = (1, *e.shape) if e.batch and len(e.shape) == 1 else e.shape
        known[e.name] = _operand(e, shape, (*shape[1:], 1))
    return known


def _grouped_operands(problem: Problem) -> dict[str, dict[str, Any]]:
    """Return operands of grouped products: B [groups, K, N], A and C [M, …] or [groups, room, …], ends or counts."""
    strides = {"b": (problem.k * problem.n, *_strides(problem.leads[1], problem.b.row_major))}
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
    rows, depth, layout, zeros = (getattr(spec.scaling, name) for name in ("rows", "depth", "layout", "zeros"))
    scaling = {"rows": rows, "depth": depth, "layout": layout} | ({"zeros": True} if zeros else {})
    return found | {"scaling": scaling}


def _flat(role: str, nbytes: int) -> dict[str, Any]:
    return {"bytes": nbytes, "role": role, "dtype": "i32", "shape": [nbytes // 4], "strides": [1]}

"""Writes the launch plans of a host call: what its own host code would launch, as plans of plain launches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritongemm.codegen import cpp
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import offload_bundle
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.hip_ext.host_calls.recording import RecordedLaunch
from tritongemm.system import settings
from tritongemm.system.compiled_files import CompiledFiles
from tritongemm.workers.child_process import WorkerDied, WorkerError, WorkerProcess, WorkerTimeout

_SECONDS = 120.0


def record(call: HostLaunch, facts: Target) -> list[RecordedLaunch]:
    """Return the launches of a host call, in order.

    Args:
        call: what the backend gave.
        facts: the architecture.

    Raises:
        InputError: it is not HIP's, it refuses the sizes, or its library can't be run here.
        UnavailableError: no HIP compiler for the runtime that listens.
        OutputError: that runtime can't be kept.
    """
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
    source = cpp.render_cpp("ck/recorder.cpp.j2", **values)
    compiler = hip_compiler.compiler(facts.name)
    key = hashlib.sha256(f"{compiler.version}\n{source}".encode()).hexdigest()[:16]
    kept, name = CompiledFiles(settings.cache_folder()), "recorder.so"
    entry = kept.find(f"recorder-{key}")
    if entry is None:
        entry = kept.keep(f"recorder-{key}", {name: compiler.library(source, ("-std=c++17",), _SECONDS)}, {})
    return str(entry.path / name), hashlib.sha256(entry.files[name]).hexdigest()


def plans(
    call: HostLaunch, facts: Target, known: dict[str, dict[str, Any]], sizes: dict[str, int]
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the code object and the plan of each launch, without the object's file name.

    Args:
        call: what the backend gave.
        facts: the architecture.
        known: the operands as a plan describes them, by name.
        sizes: M, N and K.
    """
    code = offload_bundle.device_code(Path(call.path).read_bytes(), facts.name)
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
                "problem": sizes,
                "launches": 1,
            },
        )

"""Backend: Composable Kernel's universal GEMM, instances of it rendered from templates/ck/ and compiled for gfx942 or gfx950.

Split-K adds into C with atomics, in C's own type; the library zeroes C first, on the same stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tritongemm.backends import _cpp_instances
from tritongemm.backends.ck import instances as ck_instances
from tritongemm.core import settings
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.launch import HostLaunch
from tritongemm.core.problem import Problem
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import code_object, offload_bundle
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.hip_ext.libraries import wheel_folders

COMPILE_SECONDS = 600.0
ARCHS = ("gfx942", "gfx950")
TEMPLATES = ("universal", "mx")
FAMILIES = ("dense", "a8w8", "a4w4_blockscale")
_HEADER = "ck/tensor_operation/gpu/device/impl/device_gemm_xdl_cshuffle_v3.hpp"
_TYPES = {
    "bf16": "ck::bhalf_t", "fp16": "ck::half_t", "fp32": "float", "int8": "int8_t", "int32": "int32_t",
    "fp8e4m3fn": "ck::f8_t", "fp8e4m3fnuz": "ck::f8_t", "fp8e5m2": "ck::bf8_t", "fp8e5m2fnuz": "ck::bf8_t",
    "fp4e2m1": "ck::f4x2_pk_t",
}  # fmt: skip
_OUTPUTS = {"bf16": ("bf16",), "fp16": ("fp16",), "int8": ("int32",), "fp4e2m1": ("bf16", "fp16")}
_MOST_SCRATCH = 1024  # bytes
_VECTOR = 16  # bytes
_POINTERS = ("a", "b", "c")
_RUN_TIME = ("split_k",)
_OPTIONS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-DUSE_ROCM=1", "-fgpu-flush-denormals-to-zero", "-fno-offload-uniform-block",
    "-mllvm", "--amdgpu-kernarg-preload-count=16", "-mllvm", "--lsr-drop-solution=1", "-mllvm", "-enable-post-misched=0",
    "-mllvm", "-amdgpu-function-calls=false",
)  # fmt: skip


def unavailable() -> str | None:
    """Why CK's kernels can't be used here, or None."""
    try:
        _headers()
        hip_compiler.compiler(ARCHS[0])
    except UnavailableError as error:
        return str(error)
    return None


def _headers() -> tuple[Path, ...]:
    """Folders of CK's headers, its own first.

    Raises:
        UnavailableError: there are none; says where it looked.
    """
    wheel = wheel_folders("aiter_meta/3rdparty/composable_kernel")
    chosen = settings.ck_folder()
    places = [chosen] if chosen else [Path("/opt/rocm"), *wheel]
    for place in places:
        include = next((p for p in (place / "include", place) if (p / _HEADER).is_file()), None)
        if include is None:
            continue
        if (include / "ck/config.h").is_file():
            return (include,)
        # Sources have no configuration: it is made when they are built. AITER's stands beside them.
        for beside in (place.parent / "ck_helper", place / "build/include"):
            if (beside / "ck/config.h").is_file():
                return include, beside
        raise UnavailableError(f"{include} has CK's sources without ck/config.h: configure CK, or install it")
    said = f"CK_DIR names {chosen}, which" if chosen else f"CK_DIR is not set, and {' or '.join(map(str, places))}"
    raise UnavailableError(f"no headers of Composable Kernel: {said} lacks include/{_HEADER}")


def refusal(problem: Problem, target: Target) -> str | None:
    """Why no instance computes this problem, or None."""
    scaled = any(e.operator == "*" for e in problem.extras)
    outputs = ("bf16", "fp16") if problem.a.is_fp8 or scaled else _OUTPUTS.get(problem.dtype_a, ())
    reason = _cpp_instances.refusal("CK", ARCHS, FAMILIES, outputs, problem, target)
    if reason:
        return reason
    if problem.bias != "none" and problem.c.is_integer:
        return "no bias on integers"
    return None


def configs(problem: Problem, target: Target, everything: bool = False) -> list[Config]:
    """Configs to try, the predicted fastest first; none where no instance computes the problem.

    Args:
        problem, target: what and where.
        everything: the whole space, not only what its ``limit`` lets through.
    """
    if refusal(problem, target):
        return []
    return _cpp_instances.configs("ck", problem, target, ck_instances.RULES, ck_instances.preference, everything)


def check(config: Config, problem: Problem, target: Target) -> str | None:
    """Why a config can't compute a problem, or None."""
    if config.template not in TEMPLATES:
        return f"CK has no template {config.template}; there are {', '.join(TEMPLATES)}"
    reasons = (rule.check(config, problem, target) for rule in ck_instances.RULES)
    return refusal(problem, target) or next(filter(None, reasons), None)


def _parameters(problem: Problem) -> list[tuple[str, str]]:
    names = [(n, "pointer") for n in _POINTERS] + [(n, "i32") for n in ("M", "N", "K", "lda", "ldb", "ldc", "splits")]
    names += [("workspace", "pointer"), ("stream", "pointer"), ("time_kernel", "i32")]
    return names + [(e.name, "pointer") for e in problem.extras]


def source(config: Config, problem: Problem) -> str:
    """The C++ text of a config's instance.

    Raises:
        InputError: the config can't be one for this problem.
    """
    try:
        values: dict[str, Any] = ck_instances.shape(config, problem)
    except ck_instances.Misfit as misfit:
        raise InputError(f"{config.name}: {misfit}") from None
    for name, dtype in (("a", problem.dtype_a), ("b", problem.dtype_b), ("c", problem.dtype_c)):
        values[name] = values[name] | {"type": _TYPES[dtype]}
    applied = [
        {
            "name": e.name,
            "type": _TYPES[e.dtype.name],
            "layout": "Row" if e.along == "n" else "Col",
            "vector": min(values["c"]["vector"], _VECTOR // e.dtype.bytes) if e.along == "n" else 1,
            "operator": e.operator,
        }
        for e in problem.extras
        if e.operator
    ]
    if config.template == "mx":
        header, device = "device_gemm_xdl_cshuffle_v3_mx.hpp", ""
    elif applied:
        header, device = "device_gemm_multiple_d_xdl_cshuffle_v3.hpp", "DeviceGemmMultiD_Xdl_CShuffle_V3"
    else:
        header, device = "device_gemm_xdl_cshuffle_v3.hpp", "DeviceGemm_Xdl_CShuffleV3"
    return _cpp_instances.render(
        "ck/mx.j2" if config.template == "mx" else "ck/xdl.j2",
        name=_cpp_instances.at_run_time(config, _RUN_TIME).name,
        formula="A @ B" + "".join(f" {e.operator} {e.name}" for e in problem.extras if e.operator),
        header=header,
        device=device,
        accumulator="int32_t" if problem.a.is_integer else "float",
        extras=applied,
        signature=_cpp_instances.signature(_parameters(problem)),
        **values,
    )


def job(config: Config, problem: Problem, target: Target, module: str) -> CompileJob:
    """What to compile for one config.

    Args:
        config: the candidate.
        problem: gives dtypes, layouts, the widest vectors its sizes allow and which sides need guarding.
        target: architecture.
        module: unused; an instance is a source of its own.

    Raises:
        InputError: the config can't compute the problem.
        UnavailableError: no headers, or nothing to compile them with.
    """
    folders, compiler = _headers(), hip_compiler.compiler(target.name)
    options = [*_OPTIONS, *(["-DCK_USE_OCP_FP8=1"] if target.fp8 == "fn" else [])]
    identity = {
        "backend": "ck",
        "arch": target.name,
        "lds": target.lds_bytes,
        "source": source(config, problem),
        "options": options,
        "compiler": compiler.version,
        "headers": _cpp_instances.fingerprint(folders[0] / _HEADER, folders[-1] / "ck/config.h"),
        "parameters": _parameters(problem),
    }
    return CompileJob(config, identity, {"folders": [str(f) for f in folders]})


def build(job: CompileJob) -> tuple[Artifact, bytes, str]:
    """Compile one instance: the Built, the shared library, its file name.

    Raises:
        InputError: the compiler refuses it.
        UnavailableError: no compiler.
    """
    wanted = job.identity
    compiler = hip_compiler.compiler(wanted["arch"])

    options = (*wanted["options"], *(f"-I{f}" for f in job.payload["folders"]))
    code = compiler.library(wanted["source"], options, COMPILE_SECONDS)
    kernels = code_object.read(offload_bundle.device_code(code, wanted["arch"]))
    built = Artifact(
        job.config,
        job.digest,
        symbol="run",
        registers=max(k.registers for k in kernels),
        spills=max(k.spills for k in kernels),
        shared=max(k.shared for k in kernels),
        threads=job.config.num_warps * ck_instances.WAVE,
        launch={"parameters": [list(p) for p in wanted["parameters"]]},
    )
    reason = f"LDS {built.shared} > {wanted['lds']} bytes" if built.shared > wanted["lds"] else ""
    if built.spills > _MOST_SCRATCH:
        reason = f"{built.spills} bytes of scratch a thread: whole arrays, not registers spilled"
    if reason:
        return replace(built, status="out_of_resources", reason=reason), b"", ""
    return built, code, "kernel.so"


def launch(built: Artifact, problem: Problem, target: Target) -> HostLaunch:
    """The call that runs a built config on one problem."""
    numbers = _cpp_instances.leading(problem) | {"splits": built.config.split_k, "time_kernel": 0}
    parameters = [(str(n), str(k)) for n, k in built.launch["parameters"]]
    return _cpp_instances.host_call(built.path, parameters, numbers, "libamdhip64.so")

"""The backend of Composable Kernel's universal GEMM, with instances from templates/ck/ compiled for gfx942 or gfx950.

Split-K adds into C with atomics, in C's own type; the library zeroes C first, on the same stream.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritongemm.backends import _cpp_instances
from tritongemm.backends.ck import instances as ck_instances
from tritongemm.codegen.render import render_cpp
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.launch import HostLaunch
from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.binaries import code_object, elf
from tritongemm.hip_ext.compilers import hip_compiler
from tritongemm.hip_ext.libraries import wheel_folders
from tritongemm.plugins.contracts import BuildInputs, Capabilities, KernelBackend
from tritongemm.system import settings

ARCHS = ("gfx942", "gfx950")
_FORMS = ("universal", "mx", "ab_scale")
TEMPLATES = (*_FORMS, *(form + ck_instances.SHUFFLED for form in _FORMS))
_HEADER = "ck/tensor_operation/gpu/device/impl/device_gemm_xdl_cshuffle_v3.hpp"
_TYPES = {
    "bf16": "ck::bhalf_t", "fp16": "ck::half_t", "fp32": "float", "int8": "int8_t", "int32": "int32_t",
    "fp8e4m3fn": "ck::f8_t", "fp8e4m3fnuz": "ck::f8_t", "fp8e5m2": "ck::bf8_t", "fp8e5m2fnuz": "ck::bf8_t",
    "fp4e2m1": "ck::f4x2_pk_t",
}  # fmt: skip
_OUTPUTS = {"bf16": ("bf16",), "fp16": ("fp16",), "int8": ("int32",), "fp4e2m1": ("bf16", "fp16")}
_MOST_SCRATCH = 1024  # bytes
_VECTOR = 16  # bytes
# Header, class and text of the device operations, by template; those of `universal` with operands in the epilogue last.
_DEVICE_OPS = {
    "universal": ("device_gemm_xdl_cshuffle_v3", "DeviceGemm_Xdl_CShuffleV3", "xdl"),
    "universal_shuffled": ("device_gemm_xdl_cshuffle_v3_b_preshuffle", "DeviceGemm_Xdl_CShuffleV3_BPreshuffle", "xdl"),
    "mx": ("device_gemm_xdl_cshuffle_v3_mx", "DeviceGemmMX_Xdl_CShuffleV3", "mx"),
    "mx_shuffled": ("device_gemm_xdl_cshuffle_v3_mx", "DeviceGemmMX_Xdl_CShuffleV3", "mx"),
    "ab_scale": (
        "device_gemm_multiple_d_xdl_cshuffle_v3_ab_scale", "DeviceGemmMultiD_ABScale_Xdl_CShuffle_V3", "ab_scale",
    ),
    "ab_scale_shuffled": (
        "device_gemm_multiple_d_xdl_cshuffle_v3_blockscale_bpreshuffle",
        "DeviceGemmMultiD_BlockScale_Xdl_CShuffle_V3_BPreshuffle", "ab_scale",
    ),
}  # fmt: skip
_DEVICE_OPS_WITH_EPILOGUE = {
    "universal": ("device_gemm_multiple_d_xdl_cshuffle_v3", "DeviceGemmMultiD_Xdl_CShuffle_V3", "xdl"),
    "universal_shuffled": (
        "device_gemm_multiple_d_xdl_cshuffle_v3_b_preshuffle", "DeviceGemmMultiD_Xdl_CShuffle_V3_BPreshuffle", "xdl",
    ),
}  # fmt: skip
_POINTERS = ("a", "b", "c")
_RUN_TIME = ("split_k",)
_OPTIONS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-DUSE_ROCM=1", "-fgpu-flush-denormals-to-zero", "-fno-offload-uniform-block",
    "-mllvm", "--amdgpu-kernarg-preload-count=16", "-mllvm", "--lsr-drop-solution=1",
    "-mllvm", "-enable-post-misched=0",
    "-mllvm", "-amdgpu-function-calls=false",
)  # fmt: skip


class CkBackend(KernelBackend):
    """Instances of CK's universal GEMM, compiled by a HIP compiler."""

    summary = "instances of Composable Kernel, which take minutes to compile"
    compile_limit_s = 600.0
    capabilities = Capabilities(archs=ARCHS, orders_b=(PLAIN, "shuffled_16x16"), scales=("epilogue", "mainloop"))

    def available(self) -> Support:
        """Say whether CK's headers and a compiler for them are installed."""
        try:
            _headers()
            hip_compiler.compiler(ARCHS[0])
        except UnavailableError as error:
            return Support(str(error))
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        able = [arch for arch in ARCHS if _cpp_instances.lists_operand(self.name, arch, problem.a.dtype)]
        if able and target.name not in able:
            return Support(f"it multiplies {problem.a.dtype} on {' and '.join(able)} only, not on {target.name}")
        scales = {spec.applied for spec in problem.extras if spec.scaling}
        mx = (problem.a.scaling, problem.b.scaling) == GRANULARITIES["mx_shuffled"]
        blocks = problem.a.type.is_fp8 and ck_instances.scales(problem) == ck_instances.block_scales(problem)
        if "mainloop" in scales and not (mx and problem.a.type.packed > 1) and not blocks:
            return Support(
                "of the scales along K it applies those of fp4, one for each 32 numbers, and of fp8 those for 1 x 128 "
                "of A, as [M, K / 128] or, with B shuffled, [K / 128, M], and 128 x 128 of B"
            )
        if blocks and (problem.bias != "none" or problem.layout != "TN"):
            return Support(f"with scales along K it reads TN and adds no bias, not {problem.key}")
        if problem.a.type.packed > 1 and not mx:
            return Support("it multiplies fp4 with a scale for each 32 numbers along K, not without")
        outputs = (
            ("bf16", "fp16") if problem.a.type.is_fp8 or "epilogue" in scales else _OUTPUTS.get(problem.a.dtype, ())
        )
        if problem.bias != "none" and problem.c.type.is_integer:
            return _cpp_instances.check_dtypes(problem, outputs) and Support("no bias on integers")
        return _cpp_instances.check_dtypes(problem, outputs)

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        rules, preference = ck_instances.RULES, ck_instances.preference
        return _cpp_instances.rank_configs(self.name, problem, target, rules, preference, everything)

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        if config.template not in TEMPLATES:
            return Support(f"CK has no template {config.template}; there are {', '.join(TEMPLATES)}")
        listed = _cpp_instances.check_ranges(self.name, config, problem, target)
        return listed and _cpp_instances.check_rules(ck_instances.RULES, config, problem, target)

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
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

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        wanted = job.identity
        compiler = hip_compiler.compiler(wanted["arch"])
        options = (*wanted["options"], *(f"-I{f}" for f in job.payload["folders"]))
        code = compiler.library(wanted["source"], options, self.compile_limit_s)
        kernels = code_object.read(elf.device_code(code, wanted["arch"]))
        artifact = Artifact(
            job.config,
            job.digest,
            symbol="run",
            registers=max(k.registers for k in kernels),
            spills=max(k.spills for k in kernels),
            shared=max(k.shared for k in kernels),
            threads=job.config.num_warps * ck_instances.WAVE,
            launch={"parameters": [list(p) for p in wanted["parameters"]]},
        )
        reason = f"LDS {artifact.shared} > {wanted['lds']} bytes" if artifact.shared > wanted["lds"] else ""
        if artifact.spills > _MOST_SCRATCH:
            reason = f"{artifact.spills} bytes of scratch a thread: arrays, not registers spilled"
        if reason:
            return replace(artifact, status="out_of_resources", reason=reason), b"", ""
        return artifact, code, "kernel.so"

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> HostLaunch:
        numbers = _cpp_instances.leading(problem) | {"splits": artifact.config.split_k, "time_kernel": 0}
        return _cpp_instances.host_call(artifact, numbers, "libamdhip64.so")


def _headers() -> tuple[Path, ...]:
    """Return the folders of CK's headers, its own first."""
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


def _parameters(problem: Problem) -> list[tuple[str, str]]:
    names = [(n, "pointer") for n in _POINTERS] + [(n, "i32") for n in ("M", "N", "K", "lda", "ldb", "ldc", "splits")]
    names += [("workspace", "pointer"), ("stream", "pointer"), ("time_kernel", "i32")]
    return names + [(e.name, "pointer") for e in problem.extras]


def source(config: Config, problem: Problem) -> str:
    """Return the C++ text of a config's instance. Raises InputError: the config is invalid for this problem."""
    try:
        values: dict[str, Any] = ck_instances.shape(config, problem)
    except ck_instances.Misfit as misfit:
        raise InputError(f"{config.name}: {misfit}") from None
    for name, dtype in (("a", problem.a.dtype), ("b", problem.b.dtype), ("c", problem.c.dtype)):
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
    with_epilogue = _DEVICE_OPS_WITH_EPILOGUE if applied else {}
    header, device, text = with_epilogue.get(config.template, _DEVICE_OPS[config.template])
    return render_cpp(
        f"ck/{text}.j2",
        name=_cpp_instances.at_run_time(config, _RUN_TIME).name,
        formula="A @ B" + "".join(f" {e.operator} {e.name}" for e in problem.extras if e.operator),
        header=f"{header}.hpp",
        device=device,
        accumulator="int32_t" if problem.a.type.is_integer else "float",
        extras=applied,
        signature=_cpp_instances.signature(_parameters(problem)),
        **values,
    )

"""The backend of CUTLASS's warp-specialised Hopper GEMM, with instances from templates/cutlass/ compiled by nvcc."""

import ctypes
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tritongemm.backends import _cpp_instances
from tritongemm.backends.cutlass import instances as cutlass_instances
from tritongemm.codegen.render import render_cpp
from tritongemm.core.artifact import Artifact, CompileJob
from tritongemm.core.config import Config
from tritongemm.core.errors import UnavailableError
from tritongemm.core.integers import cdiv
from tritongemm.core.launch import HostLaunch
from tritongemm.core.problem import Problem
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.hip_ext.libraries import wheel_folders
from tritongemm.plugins.contracts import BuildInputs, Capabilities, KernelBackend
from tritongemm.system import settings
from tritongemm.system.temporary_folder import TemporaryFolder

ARCHS = ("sm90",)
STREAM_K = "StreamKScheduler"  # the scheduler that splits a tile between workgroups
TEMPLATES = {  # mainloop, epilogue, scheduler
    "single": ("KernelTmaWarpSpecialized", "TmaWarpSpecialized", "PersistentScheduler"),
    "pingpong": ("KernelTmaWarpSpecializedPingpong", "TmaWarpSpecialized", "PersistentScheduler"),
    "cooperative": ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative", "PersistentScheduler"),
    "stream_k": ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative", STREAM_K),
}
_HEADER = "cutlass/gemm/collective/collective_builder.hpp"
_TYPES = {
    "bf16": "cutlass::bfloat16_t",
    "fp16": "cutlass::half_t",
    "fp32": "float",
    "fp8e4m3fn": "cutlass::float_e4m3_t",
}
_OUTPUTS = {"bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32"), "fp8e4m3fn": ("bf16", "fp16")}
_ALIGN = 16  # bytes: what the tensor memory accelerator wants of every row
_RUN_TIME = ("split_k", "group_m", "raster")
# Extended shapes: a tile of 80, 112, 160 … columns is one matrix instruction wide, not several.
_OPTIONS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-gencode",
    "arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-cudart", "static",
    "-diag-suppress", "20013,20015,20012",
)  # fmt: skip
_PARAMETERS = [
    *((n, "pointer") for n in ("a", "b", "c")),
    *((n, "i32") for n in ("M", "N", "K", "lda", "ldb", "ldc", "splits")),
    ("workspace", "pointer"),
    ("stream", "pointer"),
    ("workspace_bytes", "i64"),
    *((n, "i32") for n in ("sm_count", "swizzle", "raster")),
]


class CutlassBackend(KernelBackend):
    """Instances of CUTLASS's warp-specialised GEMM, compiled by nvcc."""

    summary = "instances of CUTLASS, which take minutes to compile"
    compile_limit_s = 600.0
    has_plans = False  # only launches of HIP's host code can be recorded
    capabilities = Capabilities(archs=ARCHS)

    def available(self) -> Support:
        """Say whether CUTLASS's headers and nvcc are installed."""
        try:
            _headers()
            _nvcc()
        except UnavailableError as error:
            return Support(str(error))
        return SUPPORTED

    def _supports(self, problem: Problem, target: Target) -> Support:
        dtypes = _cpp_instances.check_dtypes(problem, _OUTPUTS.get(problem.a.dtype, ()))
        if not dtypes:
            return dtypes
        if problem.a.type.is_fp8 and problem.layout != "TN":
            return Support(f"eight-bit operands must be contiguous along K (TN), not {problem.layout}")
        sizes = _cpp_instances.leading(problem)
        for name, dtype in (("lda", problem.a.type), ("ldb", problem.b.type), ("ldc", problem.c.type)):
            if sizes[name] * dtype.bytes % _ALIGN:
                return Support(f"{name} {sizes[name]}: rows must start at multiples of {_ALIGN} bytes")
        return SUPPORTED

    def _candidates(self, problem: Problem, target: Target, inputs: BuildInputs, everything: bool) -> Iterable[Config]:
        rules, preference = cutlass_instances.RULES, cutlass_instances.preference
        return _cpp_instances.rank_configs(self.name, problem, target, rules, preference, everything)

    def _check(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> Support:
        if config.template not in TEMPLATES:
            return Support(f"CUTLASS has no template {config.template}; there are {', '.join(TEMPLATES)}")
        if config.split_k > 1 and not _shares_tiles(config):
            return Support(f"{config.template} does not share tiles between workgroups")
        needed = [rule for rule in cutlass_instances.RULES if rule.name == "warp_groups"]
        listed = _cpp_instances.check_ranges(self.name, config, problem, target)
        return listed and _cpp_instances.check_rules(needed, config, problem, target)

    def _compile_job(self, config: Config, problem: Problem, target: Target, inputs: BuildInputs) -> CompileJob:
        include = _headers()
        identity = {
            "backend": "cutlass",
            "arch": target.name,
            "lds": target.lds_bytes,
            "source": source(config, problem, target),
            "options": list(_OPTIONS),
            "compiler": _version(),
            "headers": _cpp_instances.fingerprint(include / _HEADER, include / "cutlass/version.h"),
            "parameters": _parameters(problem),
        }
        return CompileJob(config, identity, {"include": str(include)})

    def _compile(self, job: CompileJob) -> tuple[Artifact, bytes, str]:
        wanted = job.identity
        with TemporaryFolder() as folder:
            file, out = folder / "kernel.cu", folder / "kernel.so"
            file.write_text(wanted["source"], encoding="utf-8")
            command = [_nvcc(), *wanted["options"], "-I", job.payload["include"], "-shared", "-Xcompiler", "-fPIC"]
            said = toolchain.run([*command, str(file), "-o", str(out)], self.compile_limit_s)
            shared: int = ctypes.CDLL(str(out)).shared_bytes()  # dynamic, which the assembler does not report
            code = out.read_bytes()
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
        artifact = Artifact(
            job.config,
            job.digest,
            symbol="run",
            registers=max((int(n) for n in re.findall(r"Used (\d+) registers", said)), default=0),
            spills=max(spills, default=0),
            shared=shared,
            threads=job.config.num_warps * 32,
            launch={"parameters": [list(p) for p in wanted["parameters"]]},
        )
        return artifact, code, "kernel.so"

    def _launch(self, artifact: Artifact, problem: Problem, target: Target) -> HostLaunch:
        config = artifact.config
        workspace = _workspace(config, problem) if _shares_tiles(config) else 0
        numbers = _cpp_instances.leading(problem) | {
            "splits": config.split_k,
            "workspace_bytes": workspace,
            "sm_count": target.compute_units,
            "swizzle": config.group_m,
            "raster": config.option("raster"),
        }
        return _cpp_instances.host_call(artifact, numbers)


def _shares_tiles(config: Config) -> bool:
    """Return whether several workgroups may add up one tile, in a workspace."""
    return TEMPLATES[config.template][2] == STREAM_K


def _headers() -> Path:
    """Return the folder of CUTLASS's headers."""
    chosen = settings.cutlass_folder()
    places = [chosen] if chosen else wheel_folders("cutlass_library/source")
    for place in places:
        for include in (place / "include", place):
            if (include / _HEADER).is_file():
                return include
    looked = ", ".join(map(str, places)) or "no installed nvidia-cutlass package"
    raise UnavailableError(f"no headers of CUTLASS 3: {looked} (CUTLASS_DIR) lacks include/{_HEADER}")


@cache
def _nvcc() -> str:
    """Return the path of NVIDIA's compiler."""
    bundled = Path("/usr/local/cuda/bin/nvcc")
    found = shutil.which("nvcc") or (str(bundled) if bundled.is_file() else None)
    if found is None:
        raise UnavailableError(f"CUTLASS's instances need nvcc; neither the PATH nor {bundled.parent} has it")
    return found


@cache
def _version() -> str:
    return toolchain.first_line([_nvcc(), "--version"])


def _parameters(problem: Problem) -> list[tuple[str, str]]:
    return _PARAMETERS + ([("bias", "pointer")] if problem.bias != "none" else [])


def source(config: Config, problem: Problem, target: Target) -> str:
    """Return the C++ text of a config's instance."""
    swapped = bool(config.option("swap_ab"))

    def operand(dtype: str, row_major: bool, flipped: bool) -> dict[str, object]:
        nbytes = {"a": problem.a.type, "b": problem.b.type, "c": problem.c.type}[dtype].bytes
        kind = _TYPES[{"a": problem.a.dtype, "b": problem.b.dtype, "c": problem.c.dtype}[dtype]]
        return {"type": kind, "layout": "Row" if row_major != flipped else "Column", "vector": _ALIGN // nbytes}

    a = operand("a", problem.a.row_major, swapped)
    b = operand("b", problem.b.row_major, swapped)
    mainloop, epilogue, scheduler = TEMPLATES[config.template]
    if problem.a.type.is_fp8:
        mainloop += "FP8FastAccum"
    bias = "" if problem.bias == "none" else _TYPES[problem.bias_dtype.name]
    # The library calls one value per row of the kernel's C "row"; that C may be the transpose of ours.
    along = "Row" if (problem.bias == "m") != swapped else "Col"
    fusion = (
        f"LinCombPer{along}Bias<OperandD, float, {bias}, void, float>"
        if bias
        else "LinearCombination<OperandD, float, void, float>"
    )
    return render_cpp(
        "cutlass/sm90.j2",
        name=_cpp_instances.at_run_time(config, _RUN_TIME).name,
        bias=bias,
        x=b if swapped else a,
        y=a if swapped else b,
        d=operand("c", True, swapped),
        tile=cutlass_instances.tile(config),
        cluster=cutlass_instances.cluster(config),
        fusion=fusion,
        epilogue=epilogue,
        schedule=mainloop,
        stages=config.num_stages,
        scheduler=scheduler,
        stream_k=_shares_tiles(config),
        lds=target.lds_bytes,
        swapped=swapped,
        signature=_cpp_instances.signature(_parameters(problem)),
    )


def _workspace(config: Config, problem: Problem) -> int:
    """Return the bytes of a partial sum and two counters of every tile, an upper bound of what the library needs."""
    m, n = config.option("cluster_m", 1), config.option("cluster_n", 1)
    tiles = cdiv(problem.m, config.block_m * m) * m * cdiv(problem.n, config.block_n * n) * n
    return tiles * (4 * config.block_m * config.block_n + 8) + 4096

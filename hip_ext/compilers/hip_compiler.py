"""HIP C++ → shared libraries: with ROCm's hipcc, or with LLVM's own clang and what the triton package carries.

clang needs HIP's headers and AMD's device libraries. Where there is no ROCm, Triton's wheel has the headers and two of
the libraries; the rest are constants, and one header, that are made here.
"""

import hashlib
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tritongemm.core.errors import UnavailableError
from tritongemm.hip_ext.compilers.toolchain import find, first_line, run
from tritongemm.hip_ext.libraries import wheel_folders
from tritongemm.system import files, settings
from tritongemm.system.compiled_files import CompiledFiles
from tritongemm.system.temporary_folder import TemporaryFolder

_ROCM = Path("/opt/rocm")
# Of the device libraries' control constants: name, type and value, in the order of the file names below.
_FLAGS = {
    "wavefrontsize64": "wavefrontsize64",
    "unsafe_math": "unsafe_math_opt",
    "daz_opt": "daz_opt",
    "finite_only": "finite_only_opt",
    "correctly_rounded_sqrt": "correctly_rounded_sqrt32",
}
_ISA = {"gfx90a": 9010, "gfx942": 9402, "gfx950": 9500}
_LAYOUT = (
    "e-p:64:64-p1:64:64-p2:32:32-p3:32:32-p4:64:64-p5:32:32-p6:32:32-p7:160:256:256:32-p8:128:128:128:48-p9:192:256:256"
    ":32-i64:64-v16:16-v24:32-v32:32-v48:64-v96:128-v192:256-v256:256-v512:512-v1024:1024-v2048:2048-n32:64-S32-A5-G1-ni"
    ":7:8:9"
)
# clang wants to see a HIP before it finds its own headers for it; which one it is changes nothing.
_VERSION = "HIP_VERSION_MAJOR=7\nHIP_VERSION_MINOR=1\nHIP_VERSION_PATCH=0\n"
_HALF = """#pragma once
#include <hip/hip_runtime.h>
// The half-precision functions that headers written for ROCm expect, as the compiler has them.
typedef _Float16 __half;
static inline __host__ __device__ __half __hneg(__half x) { return -x; }
static inline __device__ __half hsin(__half x) { return __builtin_elementwise_sin(x); }
static inline __device__ __half hexp(__half x) { return __builtin_elementwise_exp(x); }
static inline __device__ __half hlog(__half x) { return __builtin_elementwise_log(x); }
static inline __device__ __half hceil(__half x) { return __builtin_elementwise_ceil(x); }
static inline __device__ __half hfloor(__half x) { return __builtin_elementwise_floor(x); }
"""


@dataclass(frozen=True)
class HipCompiler:
    """A compiler of HIP C++."""

    command: tuple[str, ...]  # program and the options that make it one
    version: str  # its first line about itself
    # Folder that the options name, where there has to be one; it is there as long as this is.
    glue: TemporaryFolder | None = None

    def library(self, source: str, options: tuple[str, ...], seconds: float) -> bytes:
        """Compile a source to the bytes of a shared library."""
        with TemporaryFolder() as folder:
            file, out = folder / "kernel.cpp", folder / "kernel.so"
            file.write_text(source, encoding="utf-8")
            run([*self.command, *options, "-fPIC", "-shared", str(file), "-o", str(out)], seconds)
            return out.read_bytes()


@cache
def compiler(arch: str) -> HipCompiler:
    """Return the compiler of HIP C++ for an architecture."""
    hipcc = shutil.which("hipcc") or (str(_ROCM / "bin/hipcc") if (_ROCM / "bin/hipcc").is_file() else None)
    if hipcc:
        return HipCompiler((hipcc, "-x", "hip", f"--offload-arch={arch}"), first_line([hipcc, "--version"]))
    clang, _ = find("clang++"), find("ld.lld")
    if not shutil.which(first_line([clang, "-print-prog-name=clang-offload-bundler"])):
        raise UnavailableError(f"{clang} needs clang-offload-bundler, which is not beside it (Debian: clang-tools-22)")
    headers = [p for p in wheel_folders("triton/backends/amd/include") if (p / "hip/hip_runtime.h").is_file()]
    libraries = [p for p in wheel_folders("triton/backends/amd/lib") if (p / "ockl.bc").is_file()]
    if not headers or not libraries:
        raise UnavailableError(
            "no HIP compiler: neither hipcc (on the PATH or in /opt/rocm/bin), nor a triton package with "
            "backends/amd/include/hip/hip_runtime.h and backends/amd/lib/ockl.bc (3.9 has them)"
        )
    if arch not in _ISA:
        raise UnavailableError(f"clang without ROCm compiles for {', '.join(_ISA)}, not {arch}")
    version = first_line([clang, "--version"])
    glue = _glue(clang, arch, libraries[0], version)
    command = [
        clang,
        "-x",
        "hip",
        f"--offload-arch={arch}",
        f"--rocm-device-lib-path={glue.path}",
        f"--rocm-path={glue.path}",
        "-no-hip-rt",
    ]
    command += [f"-I{glue.path}", "-isystem", str(headers[0]), "-D__HIP_PLATFORM_AMD__=1"]
    return HipCompiler(tuple(command), version, glue)


def _glue(clang: str, arch: str, libraries: Path, version: str) -> TemporaryFolder:
    """Return a folder, of this process alone, with what ROCm has beside its compiler: device libraries and a header."""
    key = hashlib.sha256(f"{version} {arch} {_LAYOUT} {_FLAGS}".encode()).hexdigest()[:16]
    kept = CompiledFiles(settings.cache_folder())
    entry = kept.find(f"hip-{key}")
    if entry is None:
        entry = kept.keep(f"hip-{key}", _constants(clang, arch), {})
    glue = TemporaryFolder()
    folder = glue.path
    for name in ("ocml.bc", "ockl.bc"):
        (folder / name).symlink_to(libraries / name)
    (folder / "share/hip").mkdir(parents=True)
    (folder / "share/hip/version").write_text(_VERSION, encoding="utf-8")
    (folder / "hip").mkdir()
    (folder / "hip/hip_fp16.h").write_text(_HALF, encoding="utf-8")
    for name, bitcode in entry.files.items():
        files.atomic_write(folder / name, bitcode)
    return glue


def _constants(clang: str, arch: str) -> dict[str, bytes]:
    """Return the device libraries' control constants as bitcode by file name."""
    constants = {f"oclc_isa_version_{arch[3:]}": ("ISA_version", "i32", _ISA[arch])}
    constants |= {f"oclc_abi_version_{v}": ("ABI_version", "i32", v) for v in (400, 500, 600)}
    for file, name in _FLAGS.items():
        constants |= {f"oclc_{file}_{state}": (name, "i8", value) for state, value in (("on", 1), ("off", 0))}
    head = f'target datalayout = "{_LAYOUT}"\ntarget triple = "amdgcn-amd-amdhsa"\n'
    texts = {"opencl": head}
    for file, (name, kind, value) in constants.items():
        texts[file] = (
            f"{head}@__oclc_{name} = linkonce_odr protected local_unnamed_addr addrspace(4) constant {kind} {value}\n"
        )
    compile_ir = [clang, "-x", "ir", "-target", "amdgcn-amd-amdhsa", "-nogpulib", "-emit-llvm", "-Wno-override-module"]
    with TemporaryFolder() as folder:
        for file, text in texts.items():
            source = folder / f"{file}.ll"
            source.write_text(text, encoding="utf-8")
            run([*compile_ir, "-c", str(source), "-o", str(source.with_suffix(".bc"))], 60)
        return {f"{file}.bc": (folder / f"{file}.bc").read_bytes() for file in texts}

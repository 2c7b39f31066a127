"""Assembly sources → code objects: AMD's through clang and lld, NVIDIA's PTX through ptxas."""

import re
import shutil
from importlib import util
from pathlib import Path

from tritongemm.core.errors import UnavailableError
from tritongemm.hip_ext.compilers import toolchain
from tritongemm.system.temporary_folder import TemporaryFolder

_VERSIONS = ("", *(f"-{v}" for v in range(25, 16, -1)))
_PTX_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
SUFFIXES = (".s", ".ptx")
_SECONDS = 60.0  # limit of assembling one file


def assemble(source: Path, arch: str) -> bytes:
    """Return the code object of a source.

    Args:
        source: AMD assembly (``.s``) or PTX (``.ptx``).
        arch: ``gfx942``, ``sm90`` …

    Raises:
        UnavailableError: no assembler; says what was looked for.
        InputError: the source is refused; carries the assembler's first message.
    """
    with TemporaryFolder() as folder:
        out = folder / "kernel.bin"
        if source.suffix == ".ptx":
            target = _PTX_TARGET.search(source.read_text(encoding="utf-8", errors="replace"))
            toolchain.run(
                [
                    _ptxas(),
                    "--gpu-name",
                    target[1] if target else arch.replace("sm", "sm_"),
                    str(source),
                    "-o",
                    str(out),
                ],
                _SECONDS,
            )
        else:
            middle = str(folder / "kernel.o")
            clang = [find("clang"), "-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
            toolchain.run([*clang, "-c", str(source), "-o", middle], _SECONDS)
            toolchain.run([find("ld.lld"), "-shared", middle, "-o", str(out)], _SECONDS)
        return out.read_bytes()


def find(tool: str) -> str:
    """Return the path of a tool of LLVM, from the PATH or ROCm."""
    for version in _VERSIONS:
        found = shutil.which(tool + version)
        if found:
            return found
    bundled = Path("/opt/rocm/llvm/bin") / tool
    if bundled.is_file():
        return str(bundled)
    raise UnavailableError(
        f"{tool} is needed to assemble; neither the PATH nor {bundled.parent} has it (or {tool}-22 …)"
    )


def _ptxas() -> str:
    found = shutil.which("ptxas")
    spec = util.find_spec("triton")
    bundled = [Path(p) / "backends/nvidia/bin/ptxas" for p in (spec.submodule_search_locations or [])] if spec else []
    for path in (Path(found) if found else None, *bundled):
        if path is not None and path.is_file():
            return str(path)
    raise UnavailableError("ptxas is needed to assemble PTX; neither the PATH nor the triton package has it")

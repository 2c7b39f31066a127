from importlib.util import find_spec
from pathlib import Path

from tritongemm.system import settings


def gemm_manifests() -> tuple[Path, ...]:
    """Manifests of GEMM kernels: those of TRITONGEMM_ASM_MANIFESTS, else the wheel's."""
    spec = find_spec("aiter_meta")
    folders = map(Path, spec.submodule_search_locations or ()) if spec else ()
    return settings.asm_manifests() or tuple(sorted(f for folder in folders for f in folder.glob("hsa/*/*gemm/*.csv")))

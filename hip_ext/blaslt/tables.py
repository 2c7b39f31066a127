"""The two symbol tables of the BLASLt binding: what cuBLASLt and hipBLASLt number differently.

From cublasLt.h of CUDA 13.1 and hipblaslt.h, hipblas-common.h of ROCm 7. Values newer than an installed library are
refused by it with a status, never misread.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Table:
    """The names and numbers that one vendor's library uses."""

    vendor: str  # `nvidia` or `amd`
    label: str  # the library's name
    prefix: str  # of every symbol
    files: tuple[str, ...]  # library file names, newest first
    folders: tuple[str, ...]  # of wheels, as `package/folder`, then absolute paths
    algo_bytes: int  # size of the algorithm struct
    types: Mapping[str, int] = field(hash=False)  # element types by our names
    compute: Mapping[str, int] = field(hash=False)  # compute types
    operations: Mapping[str, int] = field(hash=False)  # `N` and `T`
    # layout, desc, preference: attribute numbers
    layout: Mapping[str, int] = field(hash=False)
    desc: Mapping[str, int] = field(hash=False)
    preference: Mapping[str, int] = field(hash=False)
    scale_modes: Mapping[str, int] = field(hash=False)  # what a scale pointer points to
    # Names of the statuses; empty where the library names them itself.
    statuses: Mapping[int, str] = field(hash=False, default_factory=dict)


# the numbers on which both agree
EPILOGUE_BIAS = 4
_TYPES = {
    "fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8e4m3fn": 28, "fp8e5m2": 29, "fp4e2m1": 33,
}  # fmt: skip
_SCALE_MODES = {"scalar": 0, "outer_vec": 3, "vec128": 4, "blk128x128": 5}

NVIDIA = Table(
    vendor="nvidia",
    label="cublaslt",
    prefix="cublasLt",
    files=("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"),
    folders=("nvidia/cu13/lib", "nvidia/cublas/lib", "/usr/local/cuda/lib64"),
    algo_bytes=64,
    types=_TYPES,
    compute={"fp32": 68, "int32": 72, "tf32": 77},
    operations={"N": 0, "T": 1},
    layout={"batch_count": 5, "batch_offset": 6},
    desc={
        "trans_a": 3, "trans_b": 4, "epilogue": 7, "bias": 8, "scale_a": 17, "scale_b": 18, "scale_d": 20,
        "fast_accumulation": 25, "bias_type": 26, "scale_mode_a": 31, "scale_mode_b": 32,
    },
    preference={
        "workspace": 1, "reduction_mask": 3, "alignment_a": 5, "alignment_b": 6, "alignment_c": 7, "alignment_d": 8,
    },
    scale_modes=_SCALE_MODES,
)  # fmt: skip

AMD = Table(
    vendor="amd",
    label="hipblaslt",
    prefix="hipblasLt",
    files=("libhipblaslt.so", "libhipblaslt.so.1", "libhipblaslt.so.0"),
    folders=(
        "torch/lib",
        "_rocm_sdk_libraries_gfx94X_dcgpu/lib",
        "_rocm_sdk_libraries_gfx950_dcgpu/lib",
        "/opt/rocm/lib",
    ),
    algo_bytes=24,
    types={**_TYPES, "fp8e4m3fnuz": 1000, "fp8e5m2fnuz": 1001},
    compute={"fp32": 2, "tf32": 6, "int32": 9},
    operations={"N": 111, "T": 112},
    layout={"batch_count": 0, "batch_offset": 1},
    desc={
        "trans_a": 0, "trans_b": 1, "epilogue": 2, "bias": 3, "bias_type": 4, "scale_a": 5, "scale_b": 6, "scale_d": 8,
        "scale_mode_a": 31, "scale_mode_b": 32,
    },
    preference={"workspace": 1},
    scale_modes={**_SCALE_MODES, "blk32_ue8m0_swizzled": 1001},
    statuses=dict(enumerate((
        "HIPBLAS_STATUS_SUCCESS", "HIPBLAS_STATUS_NOT_INITIALIZED", "HIPBLAS_STATUS_ALLOC_FAILED",
        "HIPBLAS_STATUS_INVALID_VALUE", "HIPBLAS_STATUS_MAPPING_ERROR", "HIPBLAS_STATUS_EXECUTION_FAILED",
        "HIPBLAS_STATUS_INTERNAL_ERROR", "HIPBLAS_STATUS_NOT_SUPPORTED", "HIPBLAS_STATUS_ARCH_MISMATCH",
        "HIPBLAS_STATUS_HANDLE_IS_NULLPTR", "HIPBLAS_STATUS_INVALID_ENUM", "HIPBLAS_STATUS_UNKNOWN",
    ))),
)  # fmt: skip

TABLES = {"nvidia": NVIDIA, "amd": AMD}

# cublasLtMatmulAlgoConfigAttributes_t by the names a Config's options use: (number, bytes)
ATTRIBUTES = {
    "algo": (0, 4),
    "tile": (1, 4),
    "splitk": (2, 4),
    "reduction": (3, 4),
    "swizzle": (4, 4),
    "custom": (5, 4),
    "stages": (6, 4),
    "inner": (7, 2),
    "cluster": (8, 2),
}

_FIRST_TILES = (
    (8, 8), (8, 16), (16, 8), (8, 32), (16, 16), (32, 8), (8, 64), (16, 32), (32, 16), (64, 8), (32, 32), (32, 64),
    (64, 32), (32, 128), (64, 64), (128, 32), (64, 128), (128, 64), (64, 256), (128, 128), (256, 64), (64, 512),
    (128, 256), (256, 128), (512, 64), (64, 96), (96, 64), (96, 128), (128, 160), (160, 128), (192, 128), (128, 192),
    (128, 96), (32, 256), (256, 32),
)  # fmt: skip
_LAST_TILES = ((256, 512), (256, 1024), (512, 512), (512, 1024))
_DEPTHS = (16, 32, 64, 128)


@cache
def result_type(algo_bytes: int) -> Any:
    """Return the struct cublasLtMatmulHeuristicResult_t (hipBLASLt's alike) of an algorithm of `algo_bytes` bytes."""
    fields = [("algo", ctypes.c_ubyte * algo_bytes), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int)]
    fields += [("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]
    # The algorithm is an array of 64-bit words in both libraries, and so is the struct's alignment.
    return type("Result", (ctypes.Structure,), {"_fields_": fields})


@cache
def tiles() -> dict[int, tuple[int, int]]:
    """Return cublasLtMatmulTile_t: rows and columns of D (column-major) by id, which are ordered after the first 35.

    For each height the widths in steps of 64, then for heights of multiples of 64 in steps of 8, up to the
    accumulators.
    """
    found = dict.fromkeys(_FIRST_TILES)
    grids = ((range(8, 769, 8), range(64, 769, 64), 3 << 14), (range(64, 769, 64), range(8, 769, 8), 1 << 16))
    for heights, widths, most in grids:
        found |= dict.fromkeys((m, n) for m in heights for n in widths if m * n <= most)
    return dict(enumerate([*found, *_LAST_TILES], 1))


@cache
def stages() -> dict[int, tuple[int, int]]:
    """Return cublasLtMatmulStages_t: depth of a tile along K and number of stages (0: chosen by the library) by id."""
    pairs = [(depth, count) for depth in _DEPTHS for count in range(1, 7)] + [(32, 10), (8, 4), (16, 10), (8, 5)]
    known = dict(enumerate(pairs, 1)) | {31: (8, 3)}
    return known | {32 + i: (depth, 0) for i, depth in enumerate((8, *_DEPTHS, 256, 768))}


# how a library says that it has nothing for a problem
REFUSALS = ("NOT_SUPPORTED", "INVALID_VALUE", "ARCH_MISMATCH")


@dataclass(frozen=True)
class Matrix:
    """One operand in memory, column-major."""

    dtype: str  # our name of the element type
    # rows, cols: size
    rows: int
    cols: int
    ld: int  # elements from one column to the next
    # batch, stride: number of matrices, and elements from one to the next
    batch: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Matmul:
    """D = op(A) op(B) + beta C (+ bias): all that the choice of an algorithm depends on."""

    # a, b, c, d: operands
    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    trans: str = "NN"  # `N` or `T` for A, then for B
    # compute, scale: compute type and the type of alpha and beta, names of the table
    compute: str = "fp32"
    scale: str = "fp32"
    bias: int = 0  # address of a vector with one value per row of D; 0 for none
    bias_dtype: str = ""  # its element type
    scales: tuple[int, int, int] = (0, 0, 0)  # addresses of the scales of A, B and D; 0 for one
    scale_modes: tuple[str, str] = ("scalar", "scalar")  # what those of A and B point to, names of the table
    fast: bool = False  # fp8 sums are not promoted on the way (cuBLASLt)
    alignment: int = 256  # bytes that every operand's address is a multiple of


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of the library for a Matmul."""

    raw: bytes  # the library's own struct
    workspace: int  # bytes it needs
    # cuBLASLt: its attributes (`ATTRIBUTES`); hipBLASLt: `solution`, its index in the library.
    values: tuple[tuple[str, int], ...]
    name: str = ""  # of the kernel where the library names it, else ""

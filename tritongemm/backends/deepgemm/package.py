"""Imports the package deep_gemm, and calls its functions that compute one product."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from tritongemm.core.errors import UnavailableError
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.operands import Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.hip_ext import libraries

SCALED, PLAIN_BF16 = "fp8_gemm_nt", "bf16_gemm_nt"  # the package's names of its functions
ALIGNED_ROWS = 4  # rows to which factors of A are padded for the copy engine (16 bytes)


@cache
def load() -> ModuleType:
    """Return the package deep_gemm, imported; an UnavailableError where it is not installed or does not load."""
    if find_spec("deep_gemm") is None:
        raise UnavailableError("the deep_gemm package (DeepGEMM) is not installed")
    _load_nvrtc()
    try:
        package = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UnavailableError(
            f"the deep_gemm package does not load: {why or 'no CUDA toolkit was found (CUDA_HOME)'}"
        ) from error
    if SCALED not in vars(package):
        raise UnavailableError("this deep_gemm was built without its kernels (its CUDA is too old)")
    return package


def _load_nvrtc() -> None:
    """Open CUDA's run-time compiler, which the package's extension needs but does not look for in PyTorch's wheels."""
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    folders = libraries.wheel_folders(f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib")
    with suppress(UnavailableError):  # Importing reports it where it is missing.
        libraries.load("CUDA's run-time compiler", (f"libnvrtc.so.{major}",), folders)


def function(problem: Problem) -> str:
    """Return the name of the function that computes a problem's types: with factors, or bf16 without."""
    return SCALED if problem.a.type.is_fp8 else PLAIN_BF16


def groups(problem: Problem) -> int:
    """Return the number of groups of 128 along K."""
    return cdiv(problem.k, SCALED_BLOCK)


def padded_rows(problem: Problem) -> int:
    """Return M with the padding that factors of A have in memory."""
    return round_up(problem.m, ALIGNED_ROWS)


def find(name: str) -> Callable[..., object]:
    """Return a function of the package. Raises UnavailableError: as `load`; or this version has it not."""
    found: Callable[..., object] | None = vars(load()).get(name)
    if found is None:
        raise UnavailableError(f"this version of deep_gemm has no {name}")
    return found


def group_alignment() -> int:
    """Return the rows at whose multiples groups that follow each other begin."""
    return int(str(find("get_mk_alignment_for_contiguous_layout")()))


def product(problem: Problem, tensors: Mapping[str, Tensor], overlap: bool) -> Callable[[], None]:
    """Return a call that computes C on PyTorch's current stream; a problem for which `function` has one.

    The tensors are ``a`` [M, K], ``b`` as [N, K], ``c`` [M, N]; with factors ``scale_a`` [M, K / 128], padded as
    `padded_rows` says, and ``scale_b`` [N / 128, K / 128]. With `overlap` a kernel may start before the one before it
    has ended. Raises as `load`.
    """
    compute, switched = find(function(problem)), overlapping(overlap)
    a, b, c = tensors["a"], tensors["b"], tensors["c"]

    def scaled() -> None:
        with switched():
            compute((a, tensors["scale_a"]), (b, tensors["scale_b"]), c, disable_ue8m0_cast=True)

    def plain() -> None:
        with switched():
            compute(a, b, c)

    return scaled if function(problem) == SCALED else plain


def can_overlap() -> bool:
    """Return whether this version of the package can let kernels overlap."""
    return {"get_pdl", "set_pdl"} <= vars(load()).keys()


def overlapping(overlap: bool) -> Callable[[], AbstractContextManager[object]]:
    """Make a context in which the package's switch for overlapping kernels, one for the process, is on or off."""
    if not can_overlap():
        return nullcontext
    read, turn = find("get_pdl"), find("set_pdl")

    @contextmanager
    def switched() -> Iterator[None]:
        before = read()
        turn(overlap)
        try:
            yield
        finally:
            turn(before)

    return switched

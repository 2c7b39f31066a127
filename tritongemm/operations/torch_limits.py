"""The sizes that PyTorch's 8-bit and grouped products accept, and the padding of their scale factors.

Where PyTorch has no fast product, rows tuned for another M serve a call.
"""

from typing import Final

from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import SCALED_BLOCK

_FP8_MULTIPLE: Final = 16
_INT8_MULTIPLE: Final = 8
_INT8_ROWS: Final = 16  # A has more
_GROUP_BYTES: Final = 16
_BLOCK_ARCHS: Final = ("sm90",)  # The library that PyTorch calls has kernels for them alone.
_WEIGHT_ROWS: Final = 128  # of A, for which it takes longer to dequantise a weight of four bits than to multiply it
PADDED_GROUPS: Final = 4  # multiple to which groups along K of factors of blocks of 128 x 128 are padded
ROW_MULTIPLE: Final = 4  # of A, for which cuBLASLt has products with factors along K


def takes_fp8(n: int, k: int) -> bool:
    """Return whether ``_scaled_mm`` and ``scaled_mm`` of fp8 take a weight of N rows and depth K."""
    return n % _FP8_MULTIPLE == k % _FP8_MULTIPLE == 0


def takes_blocks(arch: str) -> bool:
    """Return whether ``scaled_mm`` takes float32 factors for 128 elements along K on an architecture."""
    return arch in _BLOCK_ARCHS


def takes_int8(m: int, n: int, k: int) -> bool:
    """Return whether ``_int_mm`` takes M rows, N columns and depth K."""
    return m > _INT8_ROWS and n % _INT8_MULTIPLE == k % _INT8_MULTIPLE == 0


def takes_groups(*row_bytes: int) -> bool:
    """Return whether ``_grouped_mm`` and ``_scaled_grouped_mm`` take operands whose rows have these bytes."""
    return not any(count % _GROUP_BYTES for count in row_bytes)


def serves_other_m(problem: Problem, arch: str) -> bool:
    """Say whether a row tuned for one M serves calls of another M that no row covers.

    The kernel is correct at every M, but was not measured at this one. Where PyTorch would multiply dequantised
    operands, or one group after another, that takes several times as long as any tuned kernel; elsewhere PyTorch's
    call may be faster.
    """
    if problem.kind == "grouped":
        return True
    if problem.kind == "batched":
        return problem.a.type.bytes == 1
    if problem.a.scaling is None and problem.b.scaling is not None:
        return problem.m <= _WEIGHT_ROWS
    return problem.a.scaling is not None and problem.b.scaling is not None and not _has_fast_call(problem, arch)


def _has_fast_call(problem: Problem, arch: str) -> bool:
    """Return whether PyTorch computes a product with scale factors without turning its operands into wider numbers."""
    of_a, of_b = problem.a.scaling, problem.b.scaling
    assert of_a is not None and of_b is not None
    if problem.b.order != PLAIN:
        return False
    if problem.a.dtype == "int8":
        return takes_int8(problem.m, problem.n, problem.k) and not (of_a.depth or of_b.depth)
    if not (problem.a.type.is_fp8 and problem.b.type.is_fp8 and takes_fp8(problem.n, problem.k)):
        return False
    if not (of_a.depth or of_b.depth):
        return True
    return takes_blocks(arch) and of_a.depth == of_b.depth == SCALED_BLOCK and problem.c.dtype == "bf16"

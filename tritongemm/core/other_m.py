"""The rule by which a tuned result serves another M: only for products without a fast call in PyTorch.

The kernel is correct at every M, but was not measured at this one. Where PyTorch would multiply dequantised operands,
or one group after another, that takes several times as long as any tuned kernel; elsewhere PyTorch's call may be
faster.
"""

from __future__ import annotations

from tritongemm.core.problem import PLAIN, Problem
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.torch_limits import takes_blocks, takes_fp8, takes_int8


def serves_other_m(problem: Problem, arch: str) -> bool:
    """Say whether a row tuned for one M serves calls of another M that no row covers.

    Args:
        problem: the problem of the call.
        arch: name of the GPU's architecture.
    """
    if problem.kind == "grouped":
        return True
    if problem.kind == "batched":
        return problem.a.bytes == 1
    return problem.scale_a is not None and problem.scale_b is not None and not _has_fast_call(problem, arch)


def _has_fast_call(problem: Problem, arch: str) -> bool:
    """Whether PyTorch computes a product with scale factors without turning its operands into wider numbers."""
    of_a, of_b = problem.scale_a, problem.scale_b
    assert of_a is not None and of_b is not None
    if problem.order_b != PLAIN:
        return False
    if problem.dtype_a == "int8":
        return takes_int8(problem.m, problem.n, problem.k) and not (of_a.depth or of_b.depth)
    if not (problem.a.is_fp8 and problem.b.is_fp8 and takes_fp8(problem.n, problem.k)):
        return False
    if not (of_a.depth or of_b.depth):
        return True
    return takes_blocks(arch) and of_a.depth == of_b.depth == SCALED_BLOCK and problem.dtype_c == "bf16"

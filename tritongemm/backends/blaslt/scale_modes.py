"""The scale modes of the vendor's library: the granularity and the memory layout of the factors that it reads.

The library's A is our B, and its B our A. Factors of 1 x 128 are stored M-major: for each group along K, the rows of A
(columns of B) are contiguous; those of 128 x 128 have the groups along K of each row of blocks contiguous, padded to a
multiple of four.
"""

from collections.abc import Callable

from tritongemm.backends._scales import coverage, dense, factors, has_shape
from tritongemm.core.integers import cdiv, round_up
from tritongemm.core.operands import Operands, Tensor
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.core.target import Target

# Names of `hip_ext.blaslt.tables`, of the library's A and of its B.
_MODES = {
    "": ("scalar", "scalar"),
    "tensor": ("scalar", "scalar"),
    "row": ("outer_vec", "outer_vec"),
    "block": ("blk128x128", "vec128"),
    "group": ("vec128", "vec128"),
}
_SHUFFLED = {"e8m0_32x8": "blk32_ue8m0_swizzled"}  # orders of e8m0 factors that it reads
_BLOCK_GROUPS = 4  # multiple to which groups along K are padded in factors of 128 x 128
_ALIGNED_FACTORS = 4  # multiple at which factors of 1 x 128 of a group along K begin (16 bytes)
_LEAST_CUBLASLT = 120900  # the first version of cuBLASLt with factors of parts of an operand
_HOPPER = "sm90"  # Only its kernels apply factors of 128 along K.


def modes(problem: Problem) -> tuple[str, str] | None:
    """Return the library's scale modes of its A and its B; None if it can't read the factors."""
    scales = coverage(problem)
    if scales == "mx":
        first, second = (_SHUFFLED.get(s.layout) for s in (problem.b.scaling, problem.a.scaling) if s is not None)
        return (first, second) if first and second else None
    return _MODES.get(scales) if problem.a.type.is_fp8 or not scales else None


def supports(problem: Problem, target: Target, vendor: str | None, version: Callable[[], int]) -> Support:
    """Say whether the library applies a problem's factors on a target."""
    scales = coverage(problem)
    if not scales:
        return SUPPORTED
    if not problem.a.type.is_fp8 and scales != "mx":
        return Support(f"it applies scales to fp8 alone, not to {problem.a.dtype}")
    if modes(problem) is None or (scales == "mx" and target.vendor != "amd"):
        return Support(f"it has no scales that cover what those of {problem.key} do")
    if problem.batch > 1:
        return Support("its factors are for all products of a batch, where each has its own")
    if target.vendor == "nvidia" and scales in ("block", "group") and target.name != _HOPPER:
        return Support(
            f"its kernels with scales for each {SCALED_BLOCK} numbers along K are for {_HOPPER}, not {target.name}"
        )
    rows = {"M": problem.m} | ({"N": problem.n} if scales == "group" else {})
    for name, extent in rows.items() if scales in ("block", "group") else ():
        if extent % _ALIGNED_FACTORS:
            return Support(f"its factors of a group along K begin at 16 bytes: {name} must be a multiple of 4")
    if vendor == "nvidia" and scales != "tensor" and (found := version()) < _LEAST_CUBLASLT:
        return Support(
            f"cuBLASLt {found} scales entire operands alone; {_LEAST_CUBLASLT} (CUDA 12.9) and later do more"
        )
    return SUPPORTED


def in_order(problem: Problem, operands: Operands) -> tuple[Tensor, ...]:
    """Return the factors of the library's A and B in the layout it reads, copied if necessary; or none."""
    scales = coverage(problem)
    if scales in ("block", "group"):
        of_b = factors(problem, operands, "scale_b")
        of_b = dense(of_b, _BLOCK_GROUPS) if scales == "block" else dense(of_b.T)
        return of_b, dense(factors(problem, operands, "scale_a").T)
    return (operands["scale_b"], operands["scale_a"]) if scales else ()


def reads_as_they_are(problem: Problem) -> Support:
    """Say whether the library reads the problem's factors in place, so that they can be served."""
    scales = coverage(problem)
    if scales not in ("block", "group"):
        return SUPPORTED if modes(problem) else Support(f"no scales of the library's are those of {problem.key}")
    groups = cdiv(problem.k, SCALED_BLOCK)
    wanted = {"scale_a": (groups, problem.m), "scale_b": (groups, problem.n)}
    if scales == "block":
        padded = round_up(groups, _BLOCK_GROUPS)
        wanted["scale_b"] = (cdiv(problem.n, SCALED_BLOCK), padded)
    for name, shape in wanted.items():
        if not has_shape(problem, name, shape):
            have = problem.operands[name].shape
            return Support(f"the library wants {name} as {list(shape)} in memory, not {list(have)}")
    return SUPPORTED

"""The problems that AITER's assembly kernels with scales compute, and the workgroups that can share K.

All of them were run in an emulator.
"""

from dataclasses import dataclass

from tritongemm.backends.asm.manifest import KernelRow
from tritongemm.core.integers import cdiv
from tritongemm.core.problem import Problem
from tritongemm.core.scaling import MX_DEPTH, SCALED_BLOCK, Scaling

REACH = 2**32  # bytes that 32-bit offsets and sizes reach
_PLAIN_DEPTH = 512  # the kernel that reads B as it is fetches two steps of K before it looks at K

# Scale factors as the kernels read them.
_PER_ROW = Scaling()
_PER_32 = Scaling("e8m0", 1, MX_DEPTH, "e8m0_32x8", (32, 8))
_PER_1X128 = Scaling(depth=SCALED_BLOCK, layout="groups")
_PER_128X128 = Scaling(rows=SCALED_BLOCK, depth=SCALED_BLOCK)


@dataclass(frozen=True)
class Scaled:
    """The problems that kernels of one layout compute."""

    what: str  # in words
    dtypes: tuple[str, ...]  # of A and B
    depth: int  # the number of which K must be a multiple
    scales: tuple[Scaling, Scaling]  # the scale factors of A and of B
    step: int  # elements along K of which a workgroup's share is a multiple
    splits: tuple[int, ...]  # numbers of workgroups along K that may share a tile
    # Whether such a number may exceed the number of shares that full steps give: 8 of K = 7168 are then 7 of 1024.
    may_be_fewer: bool = False


LAYOUTS = {
    "fp4": Scaled(
        "fp4 with a scale for each 32 numbers", ("fp4e2m1",), 256, (_PER_32, _PER_32), 256, (1, 2, 4, 8), True
    ),
    "i8": Scaled(
        "int8 with a scale for each row and column", ("int8",), 128, (_PER_ROW, _PER_ROW), 128, tuple(range(1, 9))
    ),
    "fp8_blockscale": Scaled(
        "fp8 with a scale for each 128 numbers",
        ("fp8e4m3fn", "fp8e4m3fnuz"),
        128,
        (_PER_1X128, _PER_128X128),
        128,
        tuple(range(1, 9)),
    ),
}


def groups_along_k(layout: str, k: int, split: int) -> int:
    """Return the workgroups along K of a launch: kernels with scales take full steps of K, which may need fewer."""
    if layout not in LAYOUTS:
        return split
    step = LAYOUTS[layout].step
    steps = cdiv(cdiv(k, split), step)  # per workgroup
    return cdiv(k, steps * step)


def splits(layout: str, k: int) -> list[int]:
    """Return the splits along K that AITER's tuner tries; of those with equally many workgroups the first."""
    counts = {s: groups_along_k(layout, k, s) for s in LAYOUTS[layout].splits}
    if not LAYOUTS[layout].may_be_fewer:
        return [s for s, count in counts.items() if count == s]
    return [s for s, count in counts.items() if count not in (counts[lower] for lower in counts if lower < s)]


def refusal(layout: str, row: KernelRow, problem: Problem) -> str | None:
    """Return why a kernel of one of `LAYOUTS` can't compute a problem, or None."""
    wanted = LAYOUTS[layout]
    if problem.k % wanted.depth or problem.n % row.tile_n:
        return f"K must be a multiple of {wanted.depth} and N of {row.tile_n}"
    scales = problem.a.scaling, problem.b.scaling
    alike = problem.a.type == problem.b.type and problem.a.dtype in wanted.dtypes
    if not alike or scales != wanted.scales or problem.bias != "none":
        return f"it multiplies {wanted.what} and adds nothing, not {problem.key}"
    if problem.c.dtype != "bf16" or problem.layout != "TN":
        return f"it reads A row-major and B column-major (TN) and writes bf16, not {problem.key}"
    largest = max(problem.m * problem.k, problem.n * problem.k, problem.m * problem.n * problem.c.type.bytes)
    if largest >= REACH:
        return f"an operand of {largest} bytes is beyond its 32-bit offsets"
    return _mx_refusal(row, problem) if layout == "fp4" else None


def _mx_refusal(row: KernelRow, problem: Problem) -> str | None:
    if not row.shuffled and (problem.m % row.tile_m or problem.k < _PLAIN_DEPTH):
        return f"M must be a multiple of {row.tile_m} and K at least {_PLAIN_DEPTH}"
    fetched, have = 2 * row.tile_m, problem.operands["scale_a"].count
    if have < fetched:
        return f"it fetches {fetched} scales of A before it looks at M; A has {have}"
    return None
